"""Helpers of the packaging tests."""

from __future__ import annotations

import csv
import email.parser
import io
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLATFORM = "py3-none-manylinux_2_17_x86_64"
# What a user's environment may hold and a test must not: every way to another index, and the build's own variables.
_FOREIGN = (
    "PIP_",
    "UV_",
    "FLASH_ATTN_",
    "FLASH_ATTENTION_",
    "FORCE_BUILD",
    "SKIP_CUDA_BUILD",
    "PYTHONPATH",
    "VIRTUAL_",
)


def clean_environ(*, keep_index: bool = False, **variables: str) -> dict[str, str]:
    """The process's environment without what would change a build or lead to another index.

    `keep_index` leaves pip's own settings as they are, for what has to come from the user's usual index.
    """
    foreign = tuple(name for name in _FOREIGN if not (keep_index and name in ("PIP_", "UV_")))
    environ = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    environ |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    if not keep_index:
        environ |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_NO_CACHE_DIR": "1"}
    return environ | variables


def build_hook(hook: str, root: Path, folder: Path, **variables: str) -> Path:
    """Calls a hook of the project's PEP 517 backend in a process of its own; the file that it wrote."""
    code = f"import sys; from buildtools import backend; print(backend.{hook}(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(folder)]
    result = subprocess.run(command, cwd=root, env=clean_environ() | variables, capture_output=True, encoding="utf-8")
    assert result.returncode == 0, result.stderr
    return folder / str(result.stdout).splitlines()[-1]


@dataclass(frozen=True)
class Environment:
    """A virtual environment."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Environment:
        subprocess.run([sys.executable, "-m", "virtualenv", "--quiet", "--no-download", str(folder)], check=True)
        if sys.version_info < (3, 11):  # the one thing in build-system.requires
            import tomli

            site = folder / f"lib/python3.{sys.version_info.minor}/site-packages"
            shutil.copytree(Path(tomli.__file__).parent, site / "tomli")
        return cls(folder)

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def run(
        self, *arguments: str | Path, cwd: Path | None = None, environ: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs the environment's Python; the output holds both streams."""
        return subprocess.run(
            [self.python, *map(str, arguments)],
            cwd=cwd or self.folder,
            env=environ or clean_environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=600,
        )

    def pip(self, *arguments: str | Path, fails: bool = False, environ: dict[str, str] | None = None) -> str:
        """Runs pip and returns its output; a failure has to be expected."""
        environ = environ or clean_environ()
        if "--index-url" in arguments:
            environ.pop("PIP_NO_INDEX", None)
        result = self.run("-m", "pip", *arguments, environ=environ)
        assert (result.returncode != 0) == fails, result.stdout
        return result.stdout

    def version(self, name: str) -> str | None:
        """The installed version of a distribution."""
        code = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
        result = self.run("-c", code, name)
        return result.stdout.strip() if result.returncode == 0 else None


def make_wheel(
    folder: Path,
    version: str = "1.0",
    tag: str = PLATFORM,
    *,
    name: str = "attention-probe",
    inside: str | None = None,
    requires_python: str = ">=3.10",
    code: str = "",
) -> Path:
    """A small wheel with one module; `inside` is the version that its METADATA claims."""
    module = name.replace("-", "_")
    path = folder / f"{module}-{version}-{tag}.whl"
    info = f"{module}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    metadata = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {inside or version}\nRequires-Python: {requires_python}\n"
    )
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{module}.py", f"__version__ = {version!r}\n{code}")
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: {tag}\n")
        wheel.writestr(f"{info}/RECORD", f"{module}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


def make_torch(folder: Path, version: str) -> Path:
    """A wheel that says it is torch and refuses to be imported."""
    return make_wheel(folder, version, "py3-none-any", name="torch", code="raise ImportError('torch was imported')\n")


@dataclass(frozen=True)
class WheelFile:
    """What a wheel says about itself in four places."""

    path: Path
    names: list[str]
    metadata: Message
    tags: list[str]
    record: dict[str, tuple[str, str]]

    @classmethod
    def read(cls, path: Path) -> WheelFile:
        with zipfile.ZipFile(path) as wheel:
            names = wheel.namelist()
            (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
            parser = email.parser.BytesParser()
            tags = parser.parsebytes(wheel.read(f"{info}/WHEEL")).get_all("Tag") or []
            rows = list(csv.reader(io.StringIO(wheel.read(f"{info}/RECORD").decode())))
            metadata = parser.parsebytes(wheel.read(f"{info}/METADATA"))
        return cls(path, names, metadata, tags, {name: (digest, size) for name, digest, size in rows})

    def read_member(self, name: str) -> bytes:
        with zipfile.ZipFile(self.path) as wheel:
            return wheel.read(name)
