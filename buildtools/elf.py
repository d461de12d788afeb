"""What an ELF shared library needs: enough of the format to tell whether a platform tag is true."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import WheelError

_MACHINES = {62: "x86_64", 183: "aarch64"}
_SHT_DYNAMIC, _SHT_GNU_VERNEED = 6, 0x6FFFFFFE
_DT_NEEDED, _DT_RPATH, _DT_RUNPATH = 1, 15, 29


@dataclass(frozen=True)
class Needs:
    """`libraries`: DT_NEEDED names. `versions`: (library, version) of versioned symbols, such as GLIBC_2.17."""

    machine: str
    libraries: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]
    search_paths: tuple[str, ...]


def read_needs(path: Path) -> Needs:
    """The needs of a 64-bit little-endian library; WheelError if the file is not one."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise WheelError(f"{path.name} is not a 64-bit little-endian ELF file", why=f"it begins with {data[:6]!r}")
    try:
        return _read(data)
    except (struct.error, IndexError, ValueError, OverflowError) as error:
        raise WheelError(f"{path.name} is a damaged ELF file: {error}") from None


def _read(data: bytes) -> Needs:
    (machine,) = struct.unpack_from("<H", data, 18)
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + index * size) for index in range(count)]
    libraries: list[str] = []
    search_paths: list[str] = []
    versions: list[tuple[str, str]] = []
    for _, kind, _, _, offset, length, link, entries, _, _ in sections:
        if kind == _SHT_DYNAMIC:
            strings = sections[link][4]
            for position in range(offset, offset + length, 16):
                tag, value = struct.unpack_from("<qQ", data, position)
                if tag == _DT_NEEDED:
                    libraries.append(_string(data, strings + value))
                elif tag in (_DT_RPATH, _DT_RUNPATH):
                    search_paths.append(_string(data, strings + value))
        elif kind == _SHT_GNU_VERNEED:
            versions += _verneed(data, offset, entries, sections[link][4])
    if not any(section[1] == _SHT_DYNAMIC for section in sections):
        raise ValueError("it has no dynamic section")
    return Needs(_MACHINES.get(machine, f"machine {machine}"), tuple(libraries), tuple(versions), tuple(search_paths))


def _verneed(data: bytes, offset: int, entries: int, strings: int) -> Iterator[tuple[str, str]]:
    for _ in range(entries):
        _, count, file, auxiliary, following = struct.unpack_from("<HHIII", data, offset)
        position = offset + auxiliary
        for _ in range(count):
            _, _, _, name, next_auxiliary = struct.unpack_from("<IHHII", data, position)
            yield _string(data, strings + file), _string(data, strings + name)
            position += next_auxiliary
        offset += following


def _string(data: bytes, offset: int) -> str:
    return data[offset : data.index(b"\0", offset)].decode()
