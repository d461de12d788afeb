"""The ninja graph of a build: written, run, and its progress shown."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from . import archive, errors
from .compile import compile_options, kernel_to_json
from .kernels import Kernel
from .sources import SourceTree, digest

_STATUS = "@edge %f %t "  # begins each of ninja's status lines, so that they can be told from a compiler's output


@dataclass
class HostEdges:
    """The host library's part of the graph, in ninja's terms: (rule, outputs, inputs, implicit, variables) each."""

    rules: dict[str, dict[str, str]] = field(default_factory=dict)
    builds: list[tuple[str, list[str], list[str], list[str], dict[str, str]]] = field(default_factory=list)


def write_graph(
    folder: Path, root: Path, csrc: Path, kernels: Sequence[Kernel], compiler: str, host: HostEdges | None
) -> Path:
    """Write `folder`/build.ninja and the job files it needs; files that would not change are left as they are.

    ninja runs in `root`: paths below it are written relative to it, so that a moved tree is not compiled again.
    """
    ninja_syntax = _ninja_syntax()
    jobs = folder / "kernels"
    jobs.mkdir(parents=True, exist_ok=True)
    tree = SourceTree(csrc)
    digests = {source: digest(tree.closure(source)) for source in sorted({kernel.source for kernel in kernels})}
    where = relative(folder, root)
    text = _Text()
    ninja = ninja_syntax.Writer(text, width=1 << 20)
    ninja.variable("ninja_required_version", "1.5")
    ninja.variable("builddir", where)
    # The interpreter is taken from the environment: its path differs between build environments, and a changed
    # command line would compile everything again.
    python = '"$$FLASH_ATTN_EDGE_PYTHON" -S -m buildtools.edges'
    ninja.rule("kernel", f"{python} compile $in", description="$name")
    ninja.rule("pack", f"{python} pack $in", description="kernel set")
    for kernel in kernels:
        job = {
            "kernel": kernel_to_json(kernel),
            "options": compile_options(kernel),
            "compiler": compiler,
            "sources": digests[kernel.source],
        }
        write_if_changed(jobs / f"{kernel.name}.job", json.dumps(job, sort_keys=True))
        base = f"{where}/kernels/{kernel.name}"
        ninja.build([f"{base}.image", f"{base}.report"], "kernel", f"{base}.job", variables={"name": kernel.name})
    if kernels:
        pack = {"compiler": compiler, "kernels": [kernel.name for kernel in kernels]}
        write_if_changed(folder / "pack.job", json.dumps(pack, sort_keys=True))
        results = [f"{where}/kernels/{kernel.name}.{kind}" for kernel in kernels for kind in ("image", "report")]
        ninja.build(
            [f"{where}/{archive.FILE_NAME}", f"{where}/resources.json"], "pack", f"{where}/pack.job", implicit=results
        )
    if host is not None:
        for rule, settings in host.rules.items():
            ninja.rule(rule, **settings)
        for rule, outputs, inputs, implicit, variables in host.builds:
            ninja.build(outputs, rule, inputs, implicit=implicit, variables=variables)
    write_if_changed(folder / "build.ninja", text.value())
    return folder / "build.ninja"


def run_graph(graph: Path, root: Path, jobs: int, environ: Mapping[str, str], *, quiet: bool = False) -> int:
    """Run ninja on `graph` and return the number of edges that it ran.

    The first failure is raised as the error that the edge left, or as HostCompileError with the compiler's output.
    """
    for old in graph.parent.rglob("*.failed"):
        old.unlink()
    command = [str(find_ninja(environ)), "-f", relative(graph, root), "-j", str(jobs)]
    with (graph.parent / ".lock").open("w") as lock:
        _lock(lock, graph.parent, quiet)
        process = subprocess.Popen(
            command,
            cwd=root,
            env={**environ, "NINJA_STATUS": _STATUS},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # ninja and its jobs keep the lock if this process is killed, so that a new build waits for them.
            pass_fds=(lock.fileno(),),
        )
        try:
            edges, output = _follow(process, quiet)
            status = process.wait()
        except BaseException as error:
            process.terminate()
            process.wait()
            if isinstance(error, KeyboardInterrupt):
                raise errors.InterruptedBuildError(
                    "the build was interrupted", fix="start it again: it goes on from what is finished"
                ) from None
            raise
    if status != 0:
        _raise_failure(graph.parent, output)
    return edges


def _follow(process: subprocess.Popen[str], quiet: bool) -> tuple[int, str]:
    """Show progress until ninja ends. (edges that ran, ninja's other output)."""
    assert process.stdout is not None  # stdout=PIPE
    start = time.monotonic()
    done, other = 0, []
    progress = _Progress(quiet)
    for line in process.stdout:
        if line.startswith("@edge "):
            _, finished, total, name = line.rstrip("\n").split(" ", 3)
            done = int(finished)
            progress.show(done, int(total), name, time.monotonic() - start)
        else:
            other.append(line)
    progress.end()
    return done, "".join(other)


class _Progress:
    """One line that is rewritten on a terminal, a line per edge elsewhere."""

    def __init__(self, quiet: bool, stream: IO[str] | None = None) -> None:
        self._quiet = quiet
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._shown = False

    def show(self, done: int, total: int, name: str, elapsed: float) -> None:
        if self._quiet:
            return
        left = elapsed / done * (total - done) if done else 0.0
        line = f"[{done:{len(str(total))}}/{total}] {name}  elapsed {clock(elapsed)}, ETA {clock(left)}"
        self._stream.write(f"\r\x1b[K{line}" if self._terminal else f"{line}\n")
        self._stream.flush()
        self._shown = True

    def end(self) -> None:
        if self._shown and self._terminal:
            self._stream.write("\n")


def clock(seconds: float) -> str:
    """`m:ss`."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _raise_failure(folder: Path, output: str) -> None:
    failures: list[dict[str, Any]] = []
    for path in sorted(folder.rglob("*.failed")):
        failures.append(json.loads(path.read_text(encoding="utf-8")))
    if failures:
        first = failures[0]
        error_class: type[errors.BuildError] = getattr(errors, first["class"])
        also = "".join(f"\n{failure['what']}" for failure in failures[1:])
        raise error_class(first["what"] + also, why=first["why"], fix=first["fix"])
    if "FAILED:" in output:
        raise errors.HostCompileError(f"the host library does not compile:\n{output.strip()}")
    raise errors.NinjaError(f"ninja failed:\n{output.strip()}")


def _lock(file: IO[str], folder: Path, quiet: bool) -> None:
    """Wait for the build folder: two builds at once would compile the same kernels."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if not quiet:
            print(f"waiting for another build in {folder}", file=sys.stderr, flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)


def find_ninja(environ: Mapping[str, str]) -> Path:
    """ninja's executable: of the ninja package, else on PATH. NinjaError if there is none."""
    try:
        import ninja

        binary = Path(ninja.BIN_DIR, "ninja")
        if binary.is_file():
            return binary
    except ImportError:
        pass
    found = shutil.which("ninja", path=environ.get("PATH"))
    if found:
        return Path(found)
    raise _no_ninja("no executable called ninja is on PATH")


def _ninja_syntax() -> Any:
    try:
        from ninja import ninja_syntax
    except ImportError:
        raise _no_ninja("the Python package ninja, which has ninja_syntax, is not installed") from None
    return ninja_syntax


def _no_ninja(what: str) -> errors.NinjaError:
    return errors.NinjaError(
        what, why="ninja runs the compilers in parallel and only where something changed", fix="`pip install ninja`"
    )


def relative(path: Path, root: Path) -> str:
    """`path` as ninja, running in `root`, names it."""
    path, root = Path(os.path.abspath(path)), Path(os.path.abspath(root))
    return path.relative_to(root).as_posix() if root == path or root in path.parents else path.as_posix()


def write_if_changed(path: Path, text: str) -> None:
    try:
        if path.read_text(encoding="utf-8") == text:
            return
    except (OSError, UnicodeDecodeError):
        pass
    archive.write_atomically(path, text.encode())


class _Text:
    """The file that ninja_syntax writes to, in memory."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def write(self, text: str) -> None:
        self._parts.append(text)

    def close(self) -> None:
        """ninja_syntax asks for it; there is nothing to close."""

    def value(self) -> str:
        return "".join(self._parts)
