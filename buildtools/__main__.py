"""`python -m buildtools`: build kernel set or a row of the matrix, or look at the table, one kernel or an archive."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from . import wheelhouse
from .errors import BuildError, SubsetError, nearest


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m buildtools", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="compile what has changed: kernel set and host library")
    build.add_argument("--kernel-set", default="", help="of matrix.toml, by its own compiler (default: from source)")
    build.add_argument("--out", type=Path, help="build folder (default: build/)")
    build.add_argument("--quiet", action="store_true", help="no progress")
    build.set_defaults(run=_build)
    compiler = commands.add_parser("compiler", help="fetch the compiler that a kernel set pins, unless it is here")
    compiler.add_argument("--kernel-set", required=True, help="such as cu13")
    compiler.set_defaults(run=_compiler)
    host = commands.add_parser("host", help="compile the host library of one row of matrix.toml, and no kernel")
    host.add_argument("--row", required=True, help="such as torch2.6-abi0")
    host.add_argument("--out", type=Path, help="build folder (default: build/)")
    host.set_defaults(run=_host)
    wheel = commands.add_parser("wheel", help="the wheel of one row: its host library and a kernel set that is there")
    wheel.add_argument("--row", required=True, help="such as torch2.6-abi0")
    wheel.add_argument("--kernel-set", type=Path, help="the kernel set file (default: of the last build of the row's)")
    wheel.add_argument("--out", type=Path, default=Path("dist"), help="folder of the wheel (default: dist/)")
    wheel.set_defaults(run=_wheel)
    headers = commands.add_parser("headers", help="fetch the torch headers that a row is compiled with, if any")
    headers.add_argument("--row", required=True, help="such as torch2.6-abi0")
    headers.set_defaults(run=_headers)
    table = commands.add_parser("table", help="list the kernels of the table, as the subset variables select them")
    table.set_defaults(run=_table)
    one = commands.add_parser("compile", help="compile one kernel and print its resources")
    one.add_argument("key", help="such as fwd-sm80-bf16-d128-causal")
    one.add_argument("--arch", default="90", help="such as 80, 90a or ptx80 (default: 90)")
    one.add_argument("--out", type=Path, help="file for the cubin or PTX (default: KEY.ARCH.cubin or .ptx)")
    one.set_defaults(run=_compile)
    report = commands.add_parser("report", help="registers, spills and shared memory of the last build")
    report.add_argument("--out", type=Path, help="build folder (default: build/)")
    report.set_defaults(run=_report)
    show = commands.add_parser("show", help="what a kernel set file holds")
    show.add_argument("archive", type=Path)
    show.set_defaults(run=_show)
    manifest = commands.add_parser("manifest", help="list published wheels and their hashes, for the sdist")
    manifest.add_argument("wheels", nargs="*", type=Path, help="wheels, or folders of them (default: dist/)")
    manifest.add_argument("--place", action="append", default=[], help="where they are published: an index URL")
    manifest.add_argument("--out", type=Path, help="the file (default: wheels.json in the source tree)")
    manifest.set_defaults(run=_manifest)
    verify = commands.add_parser("verify", help="build a published wheel again from what it records, and compare")
    verify.add_argument("wheel", type=Path)
    verify.add_argument("--out", type=Path, help="build folder, kept for the next time (default: a temporary one)")
    verify.set_defaults(run=_verify)
    derived = commands.add_parser("generate", help="write what is derived from the tables: bake file, README's table")
    derived.add_argument("--check", action="store_true", help="write nothing; fail where a file is not up to date")
    derived.set_defaults(run=_generate)
    rows = commands.add_parser("rows", help="the rows that are built in containers, as the matrix of a workflow")
    rows.add_argument("--row", default="", help="only this one")
    rows.set_defaults(run=_rows)
    _release_arguments(commands.add_parser("release", help="the files of a release: check, write and compare them"))
    twice = commands.add_parser("reproduce", help="build rows twice, in two surroundings, and compare")
    twice.add_argument("--row", action="append", default=[], help="a row of matrix.toml; default: the first wheel")
    twice.add_argument("--all", action="store_true", help="every row whose compiler and headers are here")
    twice.add_argument("--head-dims", help="only these head dims, such as 64: quicker")
    twice.add_argument("--archs", help="only these archs, such as 90: quicker")
    twice.add_argument("--out", type=Path, help="keep both builds in this folder")
    twice.set_defaults(run=_reproduce)
    wheels = commands.add_parser("wheels", help=wheelhouse.DESCRIPTION)
    wheelhouse.add_arguments(wheels)
    wheels.set_defaults(run=wheelhouse.main)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of a listing had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except OSError as error:  # of a file that an argument names
        print(f"error: {error}", file=sys.stderr)
        return 1


def _build(options: argparse.Namespace) -> int:
    from .build import build

    folder = options.out and options.out.absolute()
    result = build(kernel_set=options.kernel_set, folder=folder, quiet=options.quiet)
    print(f"{result.compiled} steps run; {len(result.kernels)} kernels in {result.kernel_set}, for {result.platform}")
    return 0


def _compiler(options: argparse.Namespace) -> int:
    import tempfile

    from .build import ROOT, find_compiler, load_tables
    from .errors import NvrtcNotFoundError
    from .kernel_compiler import fetch

    kernel_set = load_tables()[1].kernel_set(options.kernel_set)
    with tempfile.TemporaryDirectory(prefix="flash_attn_compiler_") as folder:
        try:
            found = find_compiler(Path(folder), os.environ, kernel_set)
        except NvrtcNotFoundError:
            fetch(kernel_set, ROOT, os.environ)
            found = find_compiler(Path(folder), os.environ, kernel_set)
    print(f"{found.path}: {found.name}, for {' '.join(map(str, sorted(found.supported)))}")
    return 0


def _host(options: argparse.Namespace) -> int:
    from .rows import build_host

    result = build_host(options.row, folder=options.out and options.out.absolute())
    size = result.path.stat().st_size
    print(
        f"{result.compiled} steps run, {result.cpu_s:.1f} CPU-s; {result.path}: {size} bytes, {result.platform}, "
        f"{result.compiler.name}"
    )
    return 0


def _wheel(options: argparse.Namespace) -> int:
    from .rows import build_row_wheel

    path = build_row_wheel(options.row, options.out, kernel_set=options.kernel_set)
    print(f"{path}: {path.stat().st_size} bytes")
    return 0


def _verify(options: argparse.Namespace) -> int:
    from .verify import main as verify

    return verify(options.wheel, options.out and options.out.absolute())


def _release_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True)
    files = commands.add_parser("files", help="check the wheels of a release, and write its sdist, sums and index")
    files.add_argument("wheels", nargs="+", type=Path, help="wheels, or folders of them")
    files.add_argument("--out", type=Path, default=Path("release"), help="folder (default: release/)")
    files.add_argument("--row", action="append", help="a row that has to be there (default: all that have an image)")
    files.add_argument("--tag", help="the tag that is released, which has to be the version's")
    files.add_argument("--place", action="append", default=[], help="where the files are going to be: an index URL")
    compared = commands.add_parser("compare", help="compare a release with what a server lists")
    compared.add_argument("out", type=Path)
    compared.add_argument("--listing", type=Path, help="file names, one a line (default: standard input)")
    budget = commands.add_parser("budget", help="check wheels against matrix.toml's budget")
    budget.add_argument("wheels", nargs="+", type=Path, help="wheels, or folders of them")
    parser.set_defaults(run=_release)


def _release(options: argparse.Namespace) -> int:
    from .release import main as release

    return release(options)


def _reproduce(options: argparse.Namespace) -> int:
    from .reproduce import main as reproduce

    return reproduce(options)


def _generate(options: argparse.Namespace) -> int:
    from .generate import main as generate

    return generate(options)


def _rows(options: argparse.Namespace) -> int:
    from .generate import print_rows

    return print_rows(options)


def _headers(options: argparse.Namespace) -> int:
    from .build import load_tables
    from .rows import find_wheel
    from .torch_headers import fetch
    from .variables import read_variables

    row = find_wheel(load_tables()[1], options.row, read_variables(os.environ)).host_library
    print(fetch(row, os.environ) if row.headers else f"{row.name} needs no headers of torch")
    return 0


def _manifest(options: argparse.Namespace) -> int:
    from .archive import write_atomically
    from .build import ROOT
    from .manifest import MANIFEST_NAME, make_manifest
    from .metadata import load_project

    paths = []
    for path in options.wheels or [ROOT / "dist"]:
        paths += sorted(path.glob("flash_attn-*.whl")) if path.is_dir() else [path]
    manifest = make_manifest(paths, load_project(ROOT).base_version, options.place)
    out = options.out or ROOT / MANIFEST_NAME
    write_atomically(out, manifest.text().encode())
    print(f"{out}: {len(manifest.wheels)} wheels of {manifest.version}")
    return 0


def _table(options: argparse.Namespace) -> int:
    from .build import load_tables
    from .variables import read_variables

    table, _ = load_tables()
    variables = read_variables(os.environ)
    for row in table.select(variables.kernels, variables.head_dims):
        archs = ", ".join(str(arch) for arch in table.families[row.family].archs)
        print(f"{row.key:32} {' '.join(f'{name}={value}' for name, value in row.tiles)}  [{archs}]")
    return 0


def _compile(options: argparse.Namespace) -> int:
    from .archive import write_atomically
    from .archs import parse_arch
    from .build import ROOT, load_tables
    from .compile import check_resources, compile_kernel
    from .nvrtc import find_nvrtc, load_nvrtc
    from .sources import SourceTree

    table, _ = load_tables()
    rows = {row.key: row for row in table.rows}
    if options.key not in rows:
        raise SubsetError(
            f'the table has no kernel "{options.key}"',
            fix=f"{nearest(options.key, rows)}`python -m buildtools table` lists them",
        )
    kernel = table.kernel(rows[options.key], parse_arch(options.arch))
    library = find_nvrtc(os.environ, sys.path, load_nvrtc)
    compiled = compile_kernel(library, kernel, SourceTree(ROOT / "csrc").closure(kernel.source))
    path = options.out or Path(f"{kernel.name}.{'ptx' if kernel.arch.ptx else 'cubin'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, compiled.image)
    print(f"{path}: {len(compiled.image)} bytes, {kernel.smem_bytes} bytes of shared memory")
    for name, entry in compiled.report.entries.items():
        print(
            f"  {name}: {entry.registers} registers, {entry.spill_stores}/{entry.spill_loads} bytes spilled, "
            f"{entry.stack} bytes of stack, {entry.smem} bytes of static shared memory"
        )
    for warning in compiled.report.warnings:
        print(f"  {warning}")
    check_resources([(kernel, compiled.report)])
    return 0


def _report(options: argparse.Namespace) -> int:
    from .build import ROOT, build_folder
    from .variables import read_variables

    folder = options.out or build_folder(ROOT, read_variables(os.environ))
    path = folder / "resources.json"
    if not path.is_file():
        raise BuildError(f"{path} is not there", why="a build writes it", fix="`python -m buildtools build`")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        kernels, compiler = data["kernels"], data["compiler"]
    except (ValueError, KeyError, TypeError) as error:
        raise BuildError(f"{path} is no report of a build: {error}", fix="`python -m buildtools build`") from None
    print(f"{'kernel':40} {'registers':>14} {'spills':>6} {'smem':>7} {'bytes':>8} {'CPU-s':>6} {'MiB':>6}")
    for name, kernel in kernels.items():
        registers = "/".join(str(entry["registers"]) for entry in kernel["entries"].values()) or "-"
        print(
            f"{name:40} {registers:>14} {kernel['spills']:>6} {kernel['smem_bytes']:>7} {kernel['image_bytes']:>8} "
            f"{kernel['cpu_s']:>6.2f} {kernel['peak_mib']:>6.0f}"
        )
    total = sum(kernel["cpu_s"] for kernel in kernels.values())
    peak = max((kernel["peak_mib"] for kernel in kernels.values()), default=0.0)
    size = sum(kernel["image_bytes"] for kernel in kernels.values())
    print(f"{len(kernels)} kernels, {compiler}: {total:.1f} CPU-s, at most {peak:.0f} MiB a job, {size} bytes")
    return 0


def _show(options: argparse.Namespace) -> int:
    from .archive import read

    archive = read(options.archive)
    print(f"{options.archive}: {archive.compiler}, {len(archive.records)} kernels, sha256 {archive.sha256}")
    for record, image in zip(archive.records, archive.images, strict=True):
        print(
            f"{record.key:32} {record.arch:>6} d{record.head_dim:<4} {record.block_m}x{record.block_n} "
            f"{record.threads:>4} threads {record.smem_bytes:>7} smem {record.registers:>4} registers "
            f"{len(image):>8} bytes"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
