"""`python -m flash_attn wheels` of the installed package, which has no more of buildtools than pyproject.toml lists."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from buildtools_support import ROOT, clean_environ
from test_buildtools_choose import WHEELS

from buildtools.errors import FactError, NoWheelError
from buildtools.manifest import Manifest
from buildtools.metadata import load_project
from buildtools.wheel import package_files, runtime_files


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site-packages with the package as a wheel has it, and a list of wheels beside it."""
    folder = tmp_path_factory.mktemp("site")
    for name, data in {**package_files(ROOT), **runtime_files(load_project(ROOT))}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "wheels.json").write_text(Manifest("2.9.0", tuple(WHEELS)).text())
    return folder


def wheels(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flash_attn", "wheels", "--manifest", "wheels.json", *arguments]
    return subprocess.run(command, cwd=site, env=clean_environ(), capture_output=True, text=True, check=False)


def test_the_wheel_for_this_machine_and_for_others(site: Path) -> None:
    import torch

    result = wheels(site, "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    (decision,) = json.loads(result.stdout)["decisions"]
    assert decision["facts"]["torch"] == torch.__version__
    assert decision["wheel"]["requires"] == "torch>=2.10"
    platform = "platform=manylinux_2_28_x86_64"
    result = wheels(site, "--for", f"torch=2.6,{platform}", "--for", f"torch=2.3,{platform}", "--all")
    assert result.returncode == NoWheelError.exit_code
    assert "found flash_attn-2.9.0+torch2.6.cxx11abi0-py3-none-manylinux_2_28_x86_64.whl" in result.stdout
    assert "none of the 8 published wheels fits" in result.stdout
    assert wheels(site, "--for", "gpu=none").returncode == FactError.exit_code
