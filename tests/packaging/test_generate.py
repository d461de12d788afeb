"""What is derived from the tables: the bake file, README's table, the workflows' matrix, the lock files' headings."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging_support import ROOT

from buildtools.build import load_tables
from buildtools.errors import GeneratedFileError, TableError
from buildtools.generate import BAKE, README, bake_file, baked, check, main, table, workflow_rows

MATRIX = load_tables(ROOT)[1]
ROW = """
[host_libraries."torch2.10-abi1"]
abi = "torch"
torch = "==2.10.*"
cxx11_abi = true
machine = "x86_64"
platform = "manylinux_2_28_x86_64"
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files that generating reads and writes."""
    (tmp_path / "docker").mkdir()
    for name in ("kernels.toml", "matrix.toml", README, BAKE):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def generate(tree: Path) -> int:
    import argparse

    return main(argparse.Namespace(check=False), tree)


def test_what_is_in_the_repository_is_what_the_tables_say() -> None:
    check(ROOT)


def test_a_row_is_one_stanza_and_lint_says_what_to_run(tree: Path) -> None:
    with (tree / "matrix.toml").open("a") as file:
        file.write(ROW)
    with pytest.raises(GeneratedFileError, match=r"docker-bake\.json, README\.md: not what[\s\S]*buildtools generate"):
        check(tree)
    assert generate(tree) == 0
    check(tree)
    assert "torch2_10-abi1" in (tree / BAKE).read_text()
    assert "| `torch2.10-abi1` | ==2.10.* | cxx11abi1 |" in (tree / README).read_text()
    assert (tree / README).read_text().startswith((ROOT / README).read_text()[:200])


def test_a_file_edited_by_hand_is_found(tree: Path) -> None:
    path = tree / BAKE
    path.write_text(path.read_text().replace("linux/amd64", "linux/386", 1))
    with pytest.raises(GeneratedFileError, match=r"docker-bake\.json: not what"):
        check(tree)


def test_a_readme_without_a_place_for_the_table(tree: Path) -> None:
    (tree / README).write_text("nothing\n")
    with pytest.raises(GeneratedFileError, match="not one place for the table"):
        check(tree)


def test_the_bake_file_holds_arguments_and_images_by_digest() -> None:
    data = json.loads(bake_file(MATRIX))
    assert data["group"]["default"]["targets"] == list(data["target"])
    dockerfile = (ROOT / "docker/Dockerfile").read_text()
    for wheel in baked(MATRIX):
        target = data["target"][wheel.name.replace(".", "_")]
        assert target["args"]["ROW"] == wheel.name
        assert "@sha256:" in target["args"]["BASE_IMAGE"]
        assert target["platforms"] == [{"x86_64": "linux/amd64", "aarch64": "linux/arm64"}[wheel.host_library.machine]]
        assert all(f"ARG {name}" in dockerfile for name in target["args"])


def test_every_wheel_is_in_the_table() -> None:
    assert table(MATRIX).count("\n") == len(MATRIX.wheels) + 2


def test_the_matrix_of_the_workflow() -> None:
    command = [sys.executable, "-m", "buildtools", "rows"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=True).stdout
    rows = json.loads(answer)["include"]
    assert [row["row"] for row in rows] == [wheel.name for wheel in baked(MATRIX)]
    assert {row["runner"] for row in rows} == {"ubuntu-24.04", "ubuntu-24.04-arm"}
    assert [row["row"] for row in workflow_rows(MATRIX, "torch2.6-abi0")] == ["torch2.6-abi0"]
    with pytest.raises(TableError, match="did you mean"):
        workflow_rows(MATRIX, "torch2.6-abi1")


def test_a_row_that_fails_stops_no_other_and_can_be_run_again_alone() -> None:
    """Field case 40: in the workflow each row is a job, whose result replaces that of an earlier try."""
    text = (ROOT / ".github/workflows/wheels.yml").read_text()
    job = text.partition("\n  row:\n")[2]
    assert "fail-fast: false" in job
    assert "fromJSON(needs.plan.outputs.rows)" in job
    assert 'docker buildx bake --file docker/docker-bake.json "$TARGET"' in job  # one target, not the group
    assert "name: wheel-${{ matrix.row }}" in job
    assert "overwrite: true" in job
    assert 'buildtools rows --row "$ROW"' in text.partition("\n  row:\n")[0]  # by hand, one row


def test_rows_of_one_kernel_set_share_its_stage_of_the_dockerfile() -> None:
    """Its arguments do not name the row, so that an engine builds it once for all rows of a platform."""
    dockerfile = (ROOT / "docker/Dockerfile").read_text()
    stage = dockerfile.partition(" AS kernels\n")[2].partition("\nFROM ")[0]
    assert 'buildtools build --kernel-set "${KERNEL_SET}"' in stage
    assert "ROW" not in stage
    targets = json.loads(bake_file(MATRIX))["target"]
    assert {targets[wheel.name.replace(".", "_")]["args"]["KERNEL_SET"] for wheel in baked(MATRIX)} == {
        wheel.kernel_set.name for wheel in baked(MATRIX)
    }
