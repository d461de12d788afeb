"""The commands that ninja runs: compile one kernel, or pack the kernel set.

Each job is a JSON file that holds everything its result depends on (the texts by hash) and that is rewritten only
when that changes, so ninja's comparison of times is a comparison of contents. Results appear by atomic renames: a
build killed at any point goes on from what is finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from . import archive, compile, errors, nvrtc, sources


def main(arguments: list[str]) -> int:
    """`compile JOB` or `pack JOB`. A failure is left in JOB.failed, for the build to report."""
    command, job_name = arguments
    job = Path(job_name)
    failed = job.with_suffix(".failed")
    try:
        failed.unlink(missing_ok=True)
        {"compile": compile_job, "pack": pack_job}[command](job)
    except errors.BuildError as error:
        details = {"class": type(error).__name__, "what": error.what, "why": error.why, "fix": error.fix}
        failed.write_text(json.dumps(details), encoding="utf-8")
        return error.exit_code
    return 0


def compile_job(job: Path) -> None:
    """Write the image and the report of a kernel beside its job file."""
    data = json.loads(job.read_text(encoding="utf-8"))
    kernel = compile.kernel_from_json(data["kernel"])
    texts = sources.SourceTree(Path(os.environ["FLASH_ATTN_EDGE_CSRC"])).closure(kernel.source)
    if sources.digest(texts) != data["sources"]:
        raise errors.SourceError(
            f"a source of {kernel.key} changed while it was waiting to be compiled", fix="start the build again"
        )
    # Out of the driver's cache NVRTC returns an image without the log that the report is made of.
    os.environ["CUDA_CACHE_DISABLE"] = "1"
    library = nvrtc.Nvrtc(Path(os.environ["FLASH_ATTN_EDGE_NVRTC"]))
    compiled = compile.compile_kernel(library, kernel, texts)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    report = {
        **compile.report_to_json(compiled.report),
        "image_bytes": len(compiled.image),
        "sha256": hashlib.sha256(compiled.image).hexdigest(),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 3),
        "peak_mib": round(usage.ru_maxrss / 1024, 1),
    }
    archive.write_atomically(job.with_suffix(".report"), json.dumps(report, indent=1).encode())
    archive.write_atomically(job.with_suffix(".image"), compiled.image)


def pack_job(job: Path) -> None:
    """Write the kernel set, and resources.json with every kernel's report, beside the job file.

    ResourceError after resources.json is written, so that `python -m buildtools report` shows what is wrong.
    """
    data = json.loads(job.read_text(encoding="utf-8"))
    folder = job.parent / "kernels"
    packed, reports = [], []
    resources: dict[str, Any] = {}
    for name in data["kernels"]:
        kernel = compile.kernel_from_json(json.loads((folder / f"{name}.job").read_text(encoding="utf-8"))["kernel"])
        report_data = json.loads((folder / f"{name}.report").read_text(encoding="utf-8"))
        report = compile.report_from_json(report_data)
        packed.append((compile.record_of(kernel, report), (folder / f"{name}.image").read_bytes()))
        reports.append((kernel, report))
        resources[name] = {"smem_bytes": kernel.smem_bytes, "tiles": kernel.tiles, **report_data}
    text = json.dumps({"compiler": data["compiler"], "kernels": resources}, indent=1)
    archive.write_atomically(job.with_name("resources.json"), text.encode())
    compile.check_resources(reports)
    archive.write_atomically(job.with_name(archive.FILE_NAME), archive.pack(data["compiler"], packed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
