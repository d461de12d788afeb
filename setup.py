"""`python setup.py COMMAND`, for scripts that still say it: each command is handed to pip or to the PEP 517 backend.

Everything about the project is in pyproject.toml; use `pip install .` where you can.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
COMMANDS = {
    "install": "pip install .",
    "develop": "pip install -e .",
    "bdist_wheel": "pip wheel --no-deps -w dist .",
    "sdist": "write the sdist into dist/",
    "--name": "the distribution's name",
    "--version": "its version",
}


def pip(*arguments: str) -> int:
    return subprocess.call([sys.executable, "-m", "pip", *arguments], cwd=ROOT)


def main(arguments: list[str]) -> int:
    sys.path.insert(0, str(ROOT))
    from buildtools import backend
    from buildtools.metadata import load_project

    if len(arguments) != 1 or arguments[0] not in COMMANDS:
        commands = "\n".join(f"  {name:12} {meaning}" for name, meaning in COMMANDS.items())
        print(f"setup.py knows one of these commands, without options:\n{commands}", file=sys.stderr)
        return 2
    command = arguments[0]
    if command == "install":
        return pip("install", ".")
    if command == "develop":
        return pip("install", "-e", ".")
    if command == "bdist_wheel":
        return pip("wheel", "--no-deps", "-w", "dist", ".")
    if command == "sdist":
        print(Path("dist", backend.build_sdist(str(ROOT / "dist"))))
    else:
        project = load_project(ROOT)
        print(project.version if command == "--version" else project.fields["name"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
