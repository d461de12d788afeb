"""The static metadata in pyproject.toml as the METADATA file of a wheel and the PKG-INFO of an sdist."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import MetadataError
from .kernels import check_keys, expect, read_toml

_REQUIRED = ("name", "version", "description", "readme", "requires-python", "license", "license-files", "authors")
_OPTIONAL = ("keywords", "classifiers", "urls", "dependencies", "optional-dependencies", "scripts")


@dataclass(frozen=True)
class Project:
    """`version` is pyproject.toml's; `label` a local version label, or an empty string."""

    root: Path
    fields: Mapping[str, Any]
    sdist: tuple[str, ...]
    runtime: tuple[str, ...]  # modules of buildtools that the installed package has
    label: str = ""

    @property
    def base_version(self) -> str:
        return str(self.fields["version"])

    @property
    def version(self) -> str:
        return f"{self.base_version}+{self.label}" if self.label else self.base_version

    @property
    def file_name(self) -> str:
        """`flash_attn-2.9.0`, which begins the names of the wheel, its dist-info and the sdist."""
        return f"{re.sub(r'[-_.]+', '_', self.fields['name']).lower()}-{self.version}"

    @property
    def licenses(self) -> list[Path]:
        return [self.root / name for name in self.fields["license-files"]]

    def metadata(self) -> str:
        """The text of METADATA, core metadata version 2.4."""
        fields = self.fields
        lines = [
            "Metadata-Version: 2.4",
            f"Name: {fields['name']}",
            f"Version: {self.version}",
            f"Summary: {fields['description']}",
            f"Author: {', '.join(author['name'] for author in fields['authors'])}",
            f"License-Expression: {fields['license']}",
        ]
        lines += [f"License-File: {name}" for name in fields["license-files"]]
        if fields.get("keywords"):
            lines.append(f"Keywords: {','.join(fields['keywords'])}")
        lines += [f"Classifier: {name}" for name in fields.get("classifiers", ())]
        lines += [f"Project-URL: {label}, {url}" for label, url in fields.get("urls", {}).items()]
        lines.append(f"Requires-Python: {fields['requires-python']}")
        lines += [f"Requires-Dist: {requirement}" for requirement in fields.get("dependencies", ())]
        for extra, requirements in fields.get("optional-dependencies", {}).items():
            lines.append(f"Provides-Extra: {extra}")
            lines += [f"Requires-Dist: {_with_extra(requirement, extra)}" for requirement in requirements]
        lines.append("Description-Content-Type: text/markdown; charset=UTF-8")
        return "\n".join(lines) + "\n\n" + Path(self.root, fields["readme"]).read_text("utf-8")

    def entry_points(self) -> str:
        """The text of entry_points.txt, or an empty string."""
        scripts = self.fields.get("scripts", {})
        return "".join(
            ["[console_scripts]\n", *(f"{name} = {target}\n" for name, target in scripts.items())] if scripts else []
        )


def load_project(root: Path, label: str | None = None) -> Project:
    """pyproject.toml of `root`; MetadataError for what this backend cannot put into a wheel."""
    data = read_toml(root / "pyproject.toml")
    fields = expect(data.get("project", {}), dict, "pyproject.toml: project")
    if fields.get("dynamic"):
        raise MetadataError(
            f"pyproject.toml: project.dynamic = {fields['dynamic']}",
            why="metadata must be the same for everyone, before anything is built",
            fix="write the values into [project]",
        )
    check_keys(fields, (*_REQUIRED, *_OPTIONAL), where="pyproject.toml: project", required=_REQUIRED)
    if not re.fullmatch(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?", fields["version"]):
        raise MetadataError(f'pyproject.toml: project.version = "{fields["version"]}" is not a normalised version')
    tool = data.get("tool", {}).get("buildtools", {})
    check_keys(tool, ("sdist", "runtime"), where="pyproject.toml: tool.buildtools", required=("sdist", "runtime"))
    return Project(root, fields, tuple(tool["sdist"]), tuple(tool["runtime"]), label or "")


def _with_extra(requirement: str, extra: str) -> str:
    condition, separator, marker = requirement.partition(";")
    own = f"({marker.strip()}) and " if separator else ""
    return f"{condition.strip()}; {own}extra == '{extra}'"
