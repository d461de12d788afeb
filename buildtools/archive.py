"""The kernel set: one file with an index and the cubins, `flash_attn.kernels`.

Little endian. A header of 64 bytes, one record of 128 bytes per kernel and arch (sorted by key, then arch), then the
images, each at a multiple of 64 bytes, in the order of the records. It holds no date and no path, so equal kernels
give equal files. csrc/host/kernel_set reads the same format.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .errors import ArchiveError

FILE_NAME = "flash_attn.kernels"
MAGIC = b"FLASHKS\0"
VERSION = 1
ALIGNMENT = 64
_HEADER = struct.Struct("<8sIIII40s")
_RECORD = struct.Struct("<64s8sIIIIIIQQI12x")


@dataclass(frozen=True)
class Record:
    """One kernel for one arch. `threads`, `smem_bytes` and `split` are what a launch needs; `registers` is 0 for PTX.

    `split` is 1 where flash_bwd has two thread blocks for each key block.
    """

    key: str
    arch: str
    head_dim: int
    block_m: int
    block_n: int
    threads: int
    smem_bytes: int
    registers: int
    split: int = 0


@dataclass(frozen=True)
class Archive:
    """A kernel set in memory: `images[i]` belongs to `records[i]`."""

    compiler: str
    records: tuple[Record, ...]
    images: tuple[bytes, ...]
    sha256: str

    @property
    def keys(self) -> list[str]:
        return sorted({record.key for record in self.records})

    @property
    def archs(self) -> list[str]:
        return sorted(
            {record.arch for record in self.records}, key=lambda arch: (arch.startswith("ptx"), len(arch), arch)
        )


def pack(compiler: str, kernels: Iterable[tuple[Record, bytes]]) -> bytes:
    """The file's bytes, whatever the order of `kernels`. ArchiveError if a name does not fit or is there twice."""
    ordered = sorted(kernels, key=lambda item: (item[0].key.encode(), item[0].arch.encode()))
    offset = _HEADER.size + _RECORD.size * len(ordered)
    records, images = [], []
    previous = None
    for record, image in ordered:
        if (record.key, record.arch) == previous:
            raise ArchiveError(f"kernel {record.key} for arch {record.arch} is there twice")
        previous = (record.key, record.arch)
        padding = -offset % ALIGNMENT
        offset += padding
        images += [b"\0" * padding, image]
        records.append(
            _RECORD.pack(
                _field(record.key, 64), _field(record.arch, 8), record.head_dim, record.block_m, record.block_n,
                record.threads, record.smem_bytes, record.registers, offset, len(image), record.split,
            )
        )  # fmt: skip
        offset += len(image)
    images.append(b"\0" * (-offset % ALIGNMENT))
    header = _HEADER.pack(MAGIC, VERSION, len(ordered), _RECORD.size, 0, _field(compiler, 40))
    return b"".join([header, *records, *images])


def unpack(data: bytes, name: str = FILE_NAME) -> Archive:
    """The inverse of `pack`; every offset and name is checked, ArchiveError says what is wrong."""
    if len(data) < _HEADER.size or data[:8] != MAGIC:
        raise ArchiveError(f"{name} is not a kernel set", why=f"it begins with {data[:8]!r} and not {MAGIC!r}")
    _, version, count, record_size, _, compiler = _HEADER.unpack_from(data)
    if version != VERSION or record_size != _RECORD.size:
        raise ArchiveError(
            f"{name} is of format {version} with records of {record_size} bytes",
            why=f"this flash_attn reads format {VERSION} with records of {_RECORD.size} bytes",
            fix="install the library and the kernel set of one wheel",
        )
    if len(data) < _HEADER.size + count * record_size:
        raise ArchiveError(f"{name} is cut off: {len(data)} bytes do not hold its {count} records")
    records, images = [], []
    previous = (b"", b"")
    for index in range(count):
        fields = _RECORD.unpack_from(data, _HEADER.size + index * record_size)
        key, arch, head_dim, block_m, block_n, threads, smem_bytes, registers, offset, size, split = fields
        if (key, arch) <= previous:
            raise ArchiveError(f"{name}: record {index} is out of order")
        previous = (key, arch)
        record = Record(
            _text(key, name), _text(arch, name), head_dim, block_m, block_n, threads, smem_bytes, registers, split
        )
        if offset % ALIGNMENT or offset < _HEADER.size + count * record_size or offset + size > len(data):
            raise ArchiveError(
                f"{name} is damaged: kernel {record.key} for arch {record.arch} is said to be at {offset}, "
                f"{size} bytes long, in a file of {len(data)}"
            )
        records.append(record)
        images.append(data[offset : offset + size])
    return Archive(_text(compiler, name), tuple(records), tuple(images), hashlib.sha256(data).hexdigest())


def read(path: Path) -> Archive:
    """The kernel set in the file `path`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArchiveError(f"{path} cannot be read: {error.strerror}") from None
    return unpack(data, path.name)


def write_atomically(path: Path, data: bytes) -> None:
    """Write `path` so that nobody ever sees a part of it, even if this process is killed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _field(text: str, size: int) -> bytes:
    data = text.encode("ascii")
    if len(data) >= size:
        raise ArchiveError(f'"{text}" has {len(data)} characters; the archive has room for {size - 1}')
    return data


def _text(data: bytes, name: str) -> str:
    text, nul, rest = data.partition(b"\0")
    if not nul or rest.strip(b"\0"):
        raise ArchiveError(f"{name} is damaged: a name in it is not NUL-terminated")
    try:
        return text.decode("ascii")
    except UnicodeDecodeError:
        raise ArchiveError(f"{name} is damaged: a name in it is not ASCII") from None
