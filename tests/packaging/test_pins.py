"""Pins that `nox -s update-pins` writes into matrix.toml."""

from __future__ import annotations

import pytest
from packaging_support import ROOT

from buildtools.build import load_tables
from buildtools.errors import TableError
from buildtools.kernels import read_toml
from buildtools.matrix import parse_matrix
from buildtools.pins import pinned_images, with_pins

MATRIX = load_tables(ROOT)[1]
TEXT = (ROOT / "matrix.toml").read_text()
DIGEST = "f" * 64
CONFIGURATION = f"""
[x86_64]
manylinux_2_28 = quay.io/pypa/manylinux_2_28_x86_64@sha256:{DIGEST}  # 2027.01.01-1

[aarch64]
manylinux_2_28 = quay.io/pypa/manylinux_2_28_aarch64@sha256:{DIGEST}
"""


def test_versions_and_digests_change_and_nothing_else(tmp_path_factory: pytest.TempPathFactory) -> None:
    images = pinned_images(MATRIX, CONFIGURATION)
    assert images.keys() == MATRIX.images.keys()
    text = with_pins(TEXT, {"cu12": "12.9.99"}, images)
    path = tmp_path_factory.mktemp("pins") / "matrix.toml"
    path.write_text(text)
    changed = parse_matrix(read_toml(path))
    assert changed.kernel_sets["cu12"].version == "12.9.99"
    assert {image.image.partition("@sha256:")[2] for image in changed.images.values()} == {DIGEST}
    different = [new for old, new in zip(TEXT.splitlines(), text.splitlines(), strict=True) if old != new]
    assert len(different) == 1 + len(MATRIX.images)


def test_the_same_pins_change_nothing() -> None:
    versions = {name: item.version for name, item in MATRIX.kernel_sets.items()}
    assert with_pins(TEXT, versions, {name: item.image for name, item in MATRIX.images.items()}) == TEXT


def test_an_image_without_digest_is_an_error() -> None:
    with pytest.raises(TableError, match=r"pins no image for manylinux_2_28_x86_64 by digest: quay\.io/a:latest"):
        pinned_images(MATRIX, "[x86_64]\nmanylinux_2_28 = quay.io/a:latest\n")


def test_a_table_that_is_not_there_is_an_error() -> None:
    with pytest.raises(TableError, match=r"no table \[kernel_sets\.cu99\]"):
        with_pins(TEXT, {"cu99": "1"}, {})
