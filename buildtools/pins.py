"""New pins written into matrix.toml, which `nox -s update-pins` finds: versions of NVRTC and digests of images."""

from __future__ import annotations

import configparser
import re
from collections.abc import Mapping

from .errors import TableError
from .matrix import Matrix


def with_pins(text: str, versions: Mapping[str, str], images: Mapping[str, str]) -> str:
    """The text of matrix.toml with other versions of kernel sets ({name: version}) and images ({platform: image})."""
    for name, version in versions.items():
        text = _replace(text, f"kernel_sets.{name}", "version", version)
    for platform, image in images.items():
        text = _replace(text, f"images.{platform}", "image", image)
    return text


def _replace(text: str, table: str, key: str, value: str) -> str:
    heading = re.search(rf"^\[{re.escape(table)}\]\n(?P<body>(?:(?!\[).*\n?)*)", text, re.MULTILINE)
    if heading is None:
        raise TableError(f"matrix.toml has no table [{table}] of its own", fix="write it as a heading")
    body, count = re.subn(rf'^{key} = "[^"]*"$', f'{key} = "{value}"', heading["body"], flags=re.MULTILINE)
    if count != 1:
        raise TableError(f"matrix.toml: [{table}] has {count} lines `{key} = ...`", fix="write one")
    return text[: heading.start("body")] + body + text[heading.end("body") :]


def pinned_images(matrix: Matrix, configuration: str) -> dict[str, str]:
    """{platform: image by digest} for the matrix's images, from the list of pinned images inside cibuildwheel.

    cibuildwheel looks the digests up for each of its releases, so that no registry has to be reached here.
    """
    parser = configparser.ConfigParser()
    parser.read_string(configuration)
    result = {}
    for platform in matrix.images:
        policy, machine = re.fullmatch(r"(manylinux_\d+_\d+)_(\w+)", platform).groups()  # type: ignore[union-attr]
        image = parser.get(machine, policy, fallback="").partition("#")[0].strip()
        if not re.fullmatch(r"[^@\s]+@sha256:[0-9a-f]{64}", image):
            raise TableError(
                f"cibuildwheel pins no image for {platform} by digest: {image or 'none'}",
                why="a tag can change",
                fix="pull the image where its registry can be reached, and write NAME@sha256:... into matrix.toml",
            )
        result[platform] = image
    return result
