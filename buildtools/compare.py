"""Which bytes of two wheels differ: `python -m buildtools.compare A.whl B.whl` exits 0 only where none do."""

from __future__ import annotations

import argparse
import hashlib
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from . import archive
from .errors import BuildError, WheelDifferenceError


@dataclass(frozen=True)
class Comparison:
    """Two wheels, member by member."""

    first: Path
    second: Path
    same: tuple[str, ...]
    different: tuple[str, ...]  # in both, with other bytes
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    digests: tuple[str, str]  # sha256 of the whole files

    @property
    def identical(self) -> bool:
        return self.digests[0] == self.digests[1]

    @property
    def same_contents(self) -> bool:
        """Every member is the same; the zip files may still differ in order, dates or compression."""
        return not (self.different or self.only_first or self.only_second)

    def __str__(self) -> str:
        lines = [f"{digest}  {path}" for digest, path in zip(self.digests, (self.first, self.second), strict=True)]
        if self.identical:
            return "\n".join([*lines, "the wheels are the same, byte for byte"])
        lines += [f"  same       {name}" for name in self.same]
        lines += [f"  DIFFERENT  {name}" for name in self.different]
        lines += [f"  only in {self.first}: {name}" for name in self.only_first]
        lines += [f"  only in {self.second}: {name}" for name in self.only_second]
        if self.same_contents:
            lines.append("the members are the same; the zip files differ in their order, dates, modes or compression")
        return "\n".join(lines)


def _members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as wheel:
        return {name: hashlib.sha256(wheel.read(name)).digest() for name in wheel.namelist()}


def compare_wheels(first: Path, second: Path) -> Comparison:
    """Compares the files and, where they differ, says in which members."""
    one, other = _members(first), _members(second)
    both = sorted(one.keys() & other.keys())
    return Comparison(
        first,
        second,
        same=tuple(name for name in both if one[name] == other[name]),
        different=tuple(name for name in both if one[name] != other[name]),
        only_first=tuple(sorted(one.keys() - other.keys())),
        only_second=tuple(sorted(other.keys() - one.keys())),
        digests=(_sha256(first), _sha256(second)),
    )


def explain(name: str, first: bytes, second: bytes) -> list[str]:
    """Where two versions of a member differ: the kernels of a kernel set by key and arch, else the first byte."""
    if name.endswith(archive.FILE_NAME):
        try:
            return _explain_kernels(archive.unpack(first, name), archive.unpack(second, name))
        except BuildError as error:
            return [f"no kernel set: {error.what}"]
    pairs = list(zip(first, second, strict=False))
    at = next((index for index, (one, other) in enumerate(pairs) if one != other), len(pairs))
    count = sum(one != other for one, other in pairs) + abs(len(first) - len(second))
    sizes = f"{len(first)} bytes" if len(first) == len(second) else f"{len(first)} and {len(second)} bytes"
    return [f"{count} bytes differ, from offset {at:#x} on; {sizes}"]


def _explain_kernels(first: archive.Archive, second: archive.Archive) -> list[str]:
    one, other = (
        {(record.key, record.arch): (record, image) for record, image in zip(item.records, item.images, strict=True)}
        for item in (first, second)
    )
    lines = []
    for key, arch in sorted(one.keys() ^ other.keys()):
        lines.append(f"kernel {key} for {arch}: only in one of them")
    for key, arch in sorted(one.keys() & other.keys()):
        ours, theirs = one[key, arch][1], other[key, arch][1]
        if ours != theirs:
            lines.append(f"kernel {key} for {arch}: {explain('', ours, theirs)[0]}")
        elif one[key, arch][0] != other[key, arch][0]:
            lines.append(f"kernel {key} for {arch}: its record in the index")
    return lines or ["the header or the padding"]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check(comparison: Comparison, allowed: frozenset[str] = frozenset()) -> None:
    """Raises where the wheels differ in anything but the members whose last name is in `allowed`."""
    if comparison.identical:
        return
    lists = (comparison.different, comparison.only_first, comparison.only_second)
    unexpected = sorted({name for names in lists for name in names if name.rpartition("/")[2] not in allowed})
    if unexpected or comparison.same_contents:
        raise WheelDifferenceError(
            f"{comparison.first.name} was built twice and differs in {', '.join(unexpected) or 'the zip file itself'}",
            why="a wheel that cannot be built again cannot be verified",
            fix="compare the members with diffoscope; look for paths, dates, file order and compiler versions",
        )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m buildtools.compare", description="compare two wheels")
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--allow", action="append", default=[], metavar="NAME", help="a file that may differ")
    options = parser.parse_args(arguments)
    comparison = compare_wheels(options.first, options.second)
    print(comparison)
    try:
        check(comparison, frozenset(options.allow))
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
