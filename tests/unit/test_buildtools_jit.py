"""Compiling at first use: which kernel for which GPU, with real NVRTC on a small tree, and what a wheel has for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from buildtools_support import ROOT, clean_environ, make_tree

from buildtools import archive, compile, jit, kernels, nvrtc, sources
from buildtools.archs import parse_arch
from buildtools.errors import (
    ArchError,
    JitDisabledError,
    NvrtcNotFoundError,
    SourceError,
    SubsetError,
    VariableError,
)
from buildtools.jit import Request, Target
from buildtools.metadata import load_project
from buildtools.wheel import runtime_files
from flash_attn import warm as warm_module
from flash_attn.__main__ import main

FWD = Request("fwd", "bf16", "full", 64, ("sm80",))
BWD = Request("bwd", "bf16", "causal", 64, ("sm80",))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tree(tmp_path_factory.mktemp("tree"))


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return clean_environ(FLASH_ATTN_CACHE_DIR=str(tmp_path / "cache"))


def compiler(tree: Path, environ: dict[str, str]) -> jit.Jit:
    return jit.Jit(tree / "flash_attn", environ, sys.path)


def record_of(product: jit.Product) -> archive.Record:
    (record,) = archive.unpack(product.data).records
    return record


def arch_in(image: bytes) -> int:
    """What the cubin's own header says, in the ABI before and since CUDA 12.8."""
    assert image[:4] == b"\x7fELF"
    return image[49] if image[8] >= 8 else image[48]


# ---- Which kernel ----


@pytest.mark.parametrize(
    ("capability", "supported", "archs"),
    [
        (80, None, "80 ptx80"),
        (86, None, "86 80 ptx86"),
        (89, [80, 86, 90], "86 80 ptx86"),  # the compiler does not know it: an older minor, then PTX
        (90, None, "90 ptx90"),
        (100, [80, 86, 89, 90], "ptx90"),  # nor its major
        (130, None, "ptx120"),
        (103, None, "103 100 ptx103"),
        (121, None, "121 120 ptx121"),
        (90, [70, 75], ""),
        (75, None, ""),
    ],
)
def test_archs_of_a_gpu(capability: int, supported: list[int] | None, archs: str) -> None:
    table = kernels.load_table(ROOT / "kernels.toml")
    if capability == 130:
        supported = [80, 90, 100, 120]
    found = jit.target_archs(table, table.families["sm80"], capability, supported)
    assert " ".join(map(str, found)) == archs
    assert all(jit.runs_on(str(arch), capability) for arch in found)


def test_a_family_for_one_gpu(tree: Path) -> None:
    """Code for 90a runs on 9.0 alone, and is asked for first."""
    table = kernels.load_table(tree / "kernels.toml")
    fast = replace(table.families["sm80"], name="sm90", min_capability=90, archs=(parse_arch("90a"),), any_arch=False)
    rows = [replace(row, family="sm90") for row in table.rows if row.op == "fwd"]
    table = replace(table, families={**table.families, "sm90": fast}, rows=(*table.rows, *rows))
    families = jit.fastest_first(table, table.families)
    assert families == ("sm90", "sm80")
    for capability, keys in ((90, ["sm90-90a", "sm80-90", "sm80-ptx90"]), (100, ["sm80-ptx90"]), (80, ["sm80-80"])):
        found = jit.candidates(table, replace(FWD, families=families), Target(capability), [80, 90], [])
        names = [f"{kernel.key.split('-')[1]}-{kernel.arch}" for kernel in found if kernel.head_dim == 64]
        assert names[: len(keys)] == keys
    (first, *_) = jit.candidates(table, replace(FWD, families=("sm80",)), Target(90), None, [])
    assert first.key == "fwd-sm80-bf16-d64-full"
    # It may pad by a third more than the last family, and no further.
    for slow, fast, key in ((96, 128, "fwd-sm90-bf16-d128-full"), (64, 128, "fwd-sm80-bf16-d64-full")):
        rows = [replace(table.select(["fwd-sm80-bf16-d64-full"])[0], head_dim=slow)]
        rows.append(replace(rows[0], family="sm90", head_dim=fast))
        few = replace(table, rows=tuple(rows))
        (first, *_) = jit.candidates(few, replace(FWD, families=families), Target(90), [80, 90], [])
        assert first.key == key


@pytest.mark.parametrize(("head_dim", "built"), [(8, 64), (64, 64), (72, 128), (128, 128)])
def test_the_smallest_head_dim_that_holds_it(tree: Path, head_dim: int, built: int) -> None:
    table = kernels.load_table(tree / "kernels.toml")
    kernel = next(jit.candidates(table, replace(FWD, head_dim=head_dim), Target(90), None, []))
    assert kernel.head_dim == built


def test_what_rounds_to_fp8_is_a_row_of_its_own(environ: dict[str, str]) -> None:
    """It does not depend on the mask, so that it is compiled once a head dim, and without the forward."""
    table = kernels.load_table(ROOT / "kernels.toml")
    rounds = [row for row in table.rows if any(name.startswith("flash_round") for name in row.entry_points)]
    assert [row.key for row in rounds] == [f"round-sm90-e4m3-d{d}-general" for d in (128, 256, 64)]
    assert {row.head_dim for row in rounds} == {row.head_dim for row in table.select(["fwd-sm90-e4m3-*"])}
    for head_dim, built in ((64, 64), (80, 128), (256, 256)):
        request = Request("round", "e4m3", "general", head_dim, ("sm90",))
        (found, *_) = jit.candidates(table, request, Target(90), None, [])
        assert found.name == f"round-sm90-e4m3-d{built}-general.90a"
    product = jit.Jit(ROOT / "flash_attn", environ, sys.path).find(request, Target(90))
    record = record_of(product)
    assert (record.key, record.threads, record.smem_bytes) == (found.key, found.threads, 0)


def test_shared_memory_of_the_gpu(tree: Path) -> None:
    """Tiles for another arch where the GPU's own do not fit, and otherwise an error with both numbers."""
    table = kernels.load_table(tree / "kernels.toml")
    wide = replace(FWD, head_dim=128)
    assert next(jit.candidates(table, wide, Target(90), None, [])).smem_bytes == 81920
    assert str(next(jit.candidates(table, wide, Target(90, 60000), None, [])).arch) == "ptx90"
    refusals: list[str] = []
    assert list(jit.candidates(table, wide, Target(90, 40000), None, refusals)) == []
    error = jit.nothing_serves(table, wide, Target(90, 40000), refusals)
    assert isinstance(error, ArchError)
    for part in ("fwd bf16 full with head_dim 128", "9.0", "needs 81920 bytes", "the GPU has 40000"):
        assert part in str(error)


def test_what_the_table_does_not_have(tree: Path, environ: dict[str, str]) -> None:
    for request, told in (
        (replace(FWD, head_dim=136), "it has head dims 64, 128"),
        (replace(FWD, dtype="fp16"), "it has none of that kind"),
    ):
        with pytest.raises(SubsetError, match=told):
            compiler(tree, environ).find(request, Target(90))


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("80", 80, True), ("80", 89, True), ("86", 80, False), ("80", 90, False), ("90a", 90, True),
        ("90a", 91, False), ("90", 91, True), ("ptx80", 120, True), ("ptx90", 89, False), ("100", 103, True),
    ],
)  # fmt: skip
def test_what_runs_where(arch: str, capability: int, runs: bool) -> None:
    assert jit.runs_on(arch, capability) is runs


def test_what_the_kernel_set_serves() -> None:
    def kernel_set(*names: str) -> archive.Archive:
        records = [
            archive.Record(key, arch, int(key.split("-d")[1].split("-")[0]), 64, 64, 128, 50000, 99)
            for key, arch in (name.split("@") for name in names)
        ]
        return archive.unpack(archive.pack("nvrtc 12.9.86", [(record, b"x") for record in records]))

    both = kernel_set("fwd-sm80-bf16-d64-full@80", "fwd-sm80-bf16-d128-full@80", "fwd-sm80-bf16-d128-full@90")
    assert jit.in_kernel_set(both, FWD, Target(80)).head_dim == 64
    assert jit.in_kernel_set(both, FWD, Target(90)).head_dim == 128  # so d64 is never compiled there
    for request, target in (
        (FWD, Target(100)),
        (FWD, Target(80, 49999)),
        (replace(FWD, head_dim=136), Target(80)),
        (replace(FWD, mask="causal"), Target(80)),
        (replace(FWD, families=("sm90",)), Target(80)),
    ):
        assert jit.in_kernel_set(both, request, target) is None
    assert jit.in_kernel_set(None, FWD, Target(80)) is None


# ---- Compiling ----


@pytest.mark.parametrize("capability", [80, 86, 89, 90])
def test_compiled_for_the_gpu_that_asks(tree: Path, environ: dict[str, str], capability: int) -> None:
    """Read back from the cubin: code for exactly this GPU."""
    product = compiler(tree, environ).find(replace(FWD, head_dim=100), Target(capability))
    record = record_of(product)
    assert (product.origin, product.uncached) == ("compiled", "")
    assert (record.key, record.arch) == ("fwd-sm80-bf16-d128-full", str(capability))
    assert arch_in(archive.unpack(product.data).images[0]) == capability
    # The tiles of 86 are those of 89, too.
    assert record.smem_bytes == (49152 if capability in (86, 89) else 81920)
    assert record.registers > 0
    assert compiler(tree, environ).find(replace(FWD, head_dim=100), Target(capability)).origin == "cache"


def test_ptx_where_the_compiler_does_not_know_the_gpu(tree: Path, environ: dict[str, str]) -> None:
    product = compiler(tree, environ).find(FWD, Target(140))
    record, image = record_of(product), archive.unpack(product.data).images[0]
    assert record.arch.startswith("ptx")
    assert f".target sm_{record.arch[3:]}".encode() in image
    assert image[-1] == 0


def test_the_bytes_are_those_of_the_build(tree: Path, environ: dict[str, str]) -> None:
    product = compiler(tree, environ).find(BWD, Target(90))
    library = nvrtc.find_nvrtc(environ, sys.path, nvrtc.load_nvrtc)
    built = compile.compile_kernel(library, product.kernel, sources.SourceTree(tree / "csrc").closure("sm80/bwd.cu"))
    content = archive.unpack(product.data)
    assert content.images == (built.image,)
    assert content.records == (compile.record_of(product.kernel, built.report),)
    assert content.compiler == f"nvrtc {library.full_version()}"


@pytest.mark.alone
def test_a_real_kernel_in_less_than_two_seconds(environ: dict[str, str]) -> None:
    """Of CPU time: other work on the machine does not count."""
    real = jit.Jit(ROOT / "flash_attn", environ, sys.path)
    started = time.thread_time()
    product = real.find(Request("fwd", "bf16", "causal", 128, ("sm80",)), Target(90))
    assert product.origin == "compiled"
    assert time.thread_time() - started < 2


def test_an_entry_is_named_by_all_that_it_depends_on(tmp_path: Path, environ: dict[str, str]) -> None:
    def name(change: tuple[str, str, str] | None = None, folder: str = "a") -> str:
        root = make_tree(tmp_path / folder)
        if change:
            path, old, new = change
            text = (root / path).read_text()
            assert old in text
            (root / path).write_text(text.replace(old, new))
        own = {**environ, "FLASH_ATTN_CACHE_DIR": str(tmp_path / f"{folder}.cache")}
        compiler(root, own).find(FWD, Target(90))
        (entry,) = os.listdir(own["FLASH_ATTN_CACHE_DIR"])
        return entry

    same = name()
    assert name(folder="elsewhere") == same
    assert same.startswith("fwd-sm80-bf16-d64-full.90.")
    assert ".nvrtc-" in same
    different = {
        same,
        name(("csrc/kernels/sm80/fwd.cu", "twice(", "twice ("), "b"),
        name(("csrc/kernels/common/twice.cuh", "2 * x", "x * 2"), "c"),
        name(("csrc/params.h", "float* x;", "float* x; float* y;"), "d"),
        name(
            (
                "kernels.toml",
                "64 = { block_m = 64, block_n = 64, warps = 4",
                "64 = { block_m = 64, block_n = 64, warps = 8",
            ),
            "e",
        ),
    }
    assert len(different) == 5


def test_eight_processes_compile_it_once(tree: Path, environ: dict[str, str]) -> None:
    """The same key at the same time, by real compilers: one compiles, and all have the same bytes."""
    code = f"""
import hashlib, os, pathlib, sys
sys.path.insert(0, {str(ROOT)!r})
from buildtools import jit
found = jit.Jit(pathlib.Path({str(tree / "flash_attn")!r}), os.environ, sys.path).find(
    jit.Request("fwd", "bf16", "full", 64, ("sm80",)), jit.Target(90))
print(found.origin, hashlib.sha256(found.data).hexdigest())
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True) for _ in range(8)
    ]
    answers = [process.communicate(timeout=120)[0].split() for process in processes]
    assert sorted(origin for origin, _ in answers) == ["cache"] * 7 + ["compiled"]
    assert len({digest for _, digest in answers}) == 1
    assert len(os.listdir(environ["FLASH_ATTN_CACHE_DIR"])) == 1


def test_an_entry_of_another_kernel_is_not_used(tree: Path, environ: dict[str, str]) -> None:
    first = compiler(tree, environ)
    fwd, bwd = first.find(FWD, Target(90)), first.find(BWD, Target(90))
    folder = Path(environ["FLASH_ATTN_CACHE_DIR"])
    (fwd_path,) = folder.glob("fwd*")
    (bwd_path,) = folder.glob("bwd*")
    fwd_path.write_bytes(bwd_path.read_bytes())
    again = compiler(tree, environ).find(FWD, Target(90))
    assert (again.origin, again.data) == ("compiled", fwd.data)
    assert again.data != bwd.data


# ---- Where it cannot be compiled ----


@pytest.mark.parametrize("value", ["0", "off", "False"])
def test_switched_off(tree: Path, environ: dict[str, str], value: str) -> None:
    """The key, the arch and what to do; a kernel that is in the cache is not used either."""
    compiler(tree, environ).find(FWD, Target(90))
    off = {**environ, "FLASH_ATTN_JIT": value}
    with pytest.raises(JitDisabledError) as caught:
        compiler(tree, off).find(FWD, Target(90))
    assert jit.sentence(caught.value) == (
        f"FLASH_ATTN_JIT={value} forbids to compile fwd-sm80-bf16-d64-full for arch 90. Unset FLASH_ATTN_JIT, or "
        "install a flash-attn that was built with FLASH_ATTN_CUDA_ARCHS=9.0 and head dim 64."
    )
    with pytest.raises(JitDisabledError):
        jit.check_enabled(off)


def test_neither_on_nor_off(tree: Path, environ: dict[str, str]) -> None:
    with pytest.raises(VariableError, match="FLASH_ATTN_JIT=maybe is neither true nor false"):
        compiler(tree, {**environ, "FLASH_ATTN_JIT": "maybe"}).find(FWD, Target(90))


@pytest.fixture
def no_nvrtc(environ: dict[str, str], tmp_path: Path) -> dict[str, str]:
    (tmp_path / "empty").mkdir()
    return {**environ, "FLASH_ATTN_NVRTC": str(tmp_path / "empty")}


def test_without_nvrtc(tree: Path, no_nvrtc: dict[str, str]) -> None:
    with pytest.raises(NvrtcNotFoundError, match="holds no usable"):
        compiler(tree, no_nvrtc).find(FWD, Target(90))


def test_without_nvrtc_what_another_process_compiled(
    tree: Path, environ: dict[str, str], no_nvrtc: dict[str, str]
) -> None:
    made = compiler(tree, environ).find(FWD, Target(90))
    found = compiler(tree, no_nvrtc).find(FWD, Target(90))
    assert (found.origin, found.data) == ("cache", made.data)
    with pytest.raises(NvrtcNotFoundError):
        compiler(tree, no_nvrtc).find(BWD, Target(90))
    with pytest.raises(NvrtcNotFoundError):  # compiled for newer drivers
        compiler(tree, no_nvrtc).find(FWD, Target(90, driver_cuda=(11, 8)))


def test_a_driver_older_than_the_compiler(tree: Path, environ: dict[str, str]) -> None:
    with pytest.raises(NvrtcNotFoundError) as caught:
        compiler(tree, environ).find(FWD, Target(90, driver_cuda=(11, 8)))
    assert "makes code that the driver does not load: it serves CUDA 11.8" in str(caught.value)
    assert compiler(tree, environ).find(FWD, Target(90, driver_cuda=(99, 0))).origin == "compiled"


def test_a_gpu_that_is_too_old(tree: Path, environ: dict[str, str]) -> None:
    table = kernels.load_table(tree / "kernels.toml")
    with pytest.raises(ArchError, match=r"compute capability 7\.5"):
        jit.check_target(table, ("sm80",), Target(75), [75, 80, 90])
    with pytest.raises(ArchError, match=r"compute capability 7\.5"):
        compiler(tree, environ).find(FWD, Target(75))
    jit.check_target(table, ("sm90", "sm80"), Target(80), [75, 80, 90])


def test_the_path_of_a_parent_is_no_isolation(tree: Path, environ: dict[str, str]) -> None:
    """PYTHONPATH, which pip's build isolation sets, makes no subprocess be asked at run time."""
    isolated = {**environ, "PYTHONPATH": "/nowhere", "PATH": ""}
    assert compiler(tree, isolated).find(FWD, Target(90)).origin == "compiled"


# ---- What the wheel has ----


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, data in runtime_files(load_project(ROOT)).items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "site" / "flash_attn"


def test_the_wheel_has_the_table_and_what_it_names(package: Path) -> None:
    table, tree = jit.load_sources(package)
    of_root, root_tree = kernels.load_table(ROOT / "kernels.toml"), sources.SourceTree(ROOT / "csrc")
    assert table.rows == of_root.rows
    for row, other in zip(table.rows, of_root.rows, strict=True):
        for arch in table.families[row.family].archs:
            assert table.kernel(row, arch) == of_root.kernel(other, arch)
    for source in {row.source for row in table.rows}:
        assert tree.closure(source) == root_tree.closure(source)
    files = runtime_files(load_project(ROOT))
    assert files == runtime_files(load_project(ROOT))
    assert all(str(ROOT).encode() not in data for data in files.values())


def test_an_installed_package_needs_nothing_else(package: Path, environ: dict[str, str]) -> None:
    """No TOML reader, which Python 3.10 lacks, no torch, no source tree: only the modules that the wheel has."""
    code = f"""
import sys
sys.path.insert(0, {str(package.parent)!r})
for name in ("tomllib", "tomli", "torch", "packaging", "buildtools"):
    sys.modules[name] = None
import importlib.machinery, importlib.util, types
stub = types.ModuleType("flash_attn")  # the package itself imports torch
stub.__path__ = [{str(package)!r}]
sys.modules["flash_attn"] = stub
from flash_attn._buildtools import jit
import os, pathlib
found = jit.Jit(pathlib.Path({str(package)!r}), os.environ, sys.path).find(
    jit.Request("fwd", "bf16", "full", 64, ("sm80",)), jit.Target(90))
print(found.kernel.key, found.origin)
"""
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["fwd-sm80-bf16-d64-full", "compiled"], done.stderr


def test_a_package_without_its_sources(tmp_path: Path, package: Path) -> None:
    (package / "_kernels_src" / "kernels.json").write_text("{")
    with pytest.raises(SourceError, match=r"kernels\.json is damaged"):
        jit.load_sources(package)
    with pytest.raises(SourceError, match="the kernel sources are missing"):
        jit.load_sources(tmp_path / "elsewhere" / "flash_attn")


# ---- python -m flash_attn warm ----


Warm = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def warm(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Warm:
    """Runs the command on the source tree, which has no kernel set: (exit code, lines, what is on stderr)."""

    def run(*arguments: str, **changes: str) -> tuple[int, list[str], str]:
        for name in [name for name in os.environ if name.startswith("FLASH_ATTN_")]:
            monkeypatch.delenv(name)
        for name in ("FLASH_ATTN_CACHE_DIR", *changes):
            monkeypatch.setenv(name, changes.get(name, environ["FLASH_ATTN_CACHE_DIR"]))
        code = main(["warm", *arguments])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return run


def test_warm_compiles_and_says_so(warm: Warm, environ: dict[str, str]) -> None:
    arguments = ("--arch", "9.0", "--kernels", "fwd-sm80-bf16-d64-*")
    code, lines, err = warm(*arguments)
    assert (code, err) == (0, "")
    assert f"cache {environ['FLASH_ATTN_CACHE_DIR']}" in lines[0]
    assert lines[1].startswith("fwd-sm80-bf16-d64-causal.90: compiled in ")
    compiled = len(lines) - 2
    assert lines[-1] == f"{compiled} compiled, 0 in the cache, 0 in the wheel"
    assert len(os.listdir(environ["FLASH_ATTN_CACHE_DIR"])) == compiled
    _, again, _ = warm(*arguments)
    assert again[1] == "fwd-sm80-bf16-d64-causal.90: in the cache"
    assert again[-1] == f"0 compiled, {compiled} in the cache, 0 in the wheel"


def test_warm_leaves_alone_what_the_wheel_has(warm: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "fwd-sm80-bf16-d64-full"
    records = [(archive.Record(key, arch, 64, 64, 64, 128, 1000, 99), b"x") for arch in ("80", "90")]
    (tmp_path / "flash_attn.kernels").write_bytes(archive.pack("nvrtc 12.9.86", records))
    monkeypatch.setattr(warm_module, "KERNEL_SET_NAME", str(tmp_path / "flash_attn.kernels"))
    code, lines, _ = warm("--arch", "90", "86", "10.0", "--kernels", key)
    assert code == 0
    assert [line.split(":")[0] for line in lines[1:-1]] == [f"{key}.100"]
    assert lines[-1] == "1 compiled, 0 in the cache, 2 in the wheel"


def test_warm_names_a_kernel_that_fails(warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "BASE_OPTIONS", (*compile.BASE_OPTIONS, "-Dextern=!"))
    code, lines, _ = warm("--arch", "90", "--kernels", "fwd-sm80-bf16-d64-full")
    assert code == 17
    assert "fwd-sm80-bf16-d64-full.90: FAILED: kernel fwd-sm80-bf16-d64-full does not compile for arch 90:" in lines
    assert lines[-1].endswith(", 1 failed")


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--arch", "9.0", "--kernels", "fwd-sm81-*"], 13, '--kernels: "fwd-sm81-*" matches none'),
        (["--arch", "9.0", "--head-dims", "65"], 13, "--head-dims: the table has no head dim 65"),
        (["--arch", "7.5"], 12, "compute capability 7.5"),
        (["--arch", "ptx80"], 12, "names PTX"),
        (["--arch", "hopper"], 12, '"hopper" names no GPU architecture'),
        (["--arch", "9.0", "--jobs", "-1"], 10, "--jobs -1 is not a positive integer"),
    ],
)
def test_warm_refuses(warm: Warm, arguments: list[str], code: int, told: str) -> None:
    found, _, err = warm(*arguments)
    assert (found, told in err) == (code, True), err


def test_warm_without_what_it_needs(warm: Warm, no_nvrtc: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for changes, code, told in (
        ({"FLASH_ATTN_NVRTC": no_nvrtc["FLASH_ATTN_NVRTC"]}, 16, "FLASH_ATTN_NVRTC"),
        ({"FLASH_ATTN_JIT": "0"}, 50, "FLASH_ATTN_JIT=0 forbids it"),
        ({"FLASH_ATTN_CACHE_DIR": str(tmp_path / "file" / "x")}, 51, "nothing can be kept"),
    ):
        found, _, err = warm("--arch", "9.0", **changes)
        assert (found, told in err) == (code, True), err


def test_kernels_json_is_json(package: Path) -> None:
    text = (package / "_kernels_src" / "kernels.json").read_text()
    assert text == json.dumps(json.loads(text), indent=1) + "\n"
