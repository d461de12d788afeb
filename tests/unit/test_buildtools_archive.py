"""The kernel set file: its layout, and that a damaged one is always refused with an ArchiveError."""

from __future__ import annotations

import struct

import pytest
from buildtools_support import ROOT  # noqa: F401  (puts buildtools on the path)

from buildtools import archive
from buildtools.archive import Record, pack, read, unpack, write_atomically
from buildtools.errors import ArchiveError

RECORDS = [
    (Record("fwd-sm80-bf16-d64-full", "90", 64, 128, 64, 128, 49152, 240), b"\x7fELF" + b"a" * 61),
    (Record("fwd-sm80-bf16-d64-full", "100", 64, 128, 64, 128, 49152, 241), b"\x7fELF" + b"b" * 60),
    (Record("bwd-sm80-bf16-d64-full", "ptx80", 64, 64, 64, 256, 82944, 0, split=1), b".version 8.8\0"),
]
COMPILER = "nvrtc 12.9.86"


def test_round_trip_in_order_of_key_and_arch():
    data = pack(COMPILER, RECORDS)
    found = unpack(data)
    assert found.compiler == COMPILER
    assert list(zip(found.records, found.images, strict=True)) == [RECORDS[2], RECORDS[1], RECORDS[0]]
    assert found.keys == ["bwd-sm80-bf16-d64-full", "fwd-sm80-bf16-d64-full"]
    assert found.archs == ["90", "100", "ptx80"]


def test_bytes_do_not_depend_on_the_order():
    assert pack(COMPILER, RECORDS) == pack(COMPILER, reversed(RECORDS))


def test_layout_is_the_one_that_the_host_library_reads():
    data = pack(COMPILER, RECORDS)
    magic, version, count, record_size, reserved = struct.unpack_from("<8sIIII", data)
    assert (magic, version, count, record_size, reserved) == (b"FLASHKS\0", 1, 3, 128, 0)
    assert data[24:64] == COMPILER.encode().ljust(40, b"\0")
    for index in range(count):
        record = data[64 + 128 * index : 64 + 128 * (index + 1)]
        offset, size = struct.unpack_from("<QQ", record, 96)
        assert offset % 64 == 0
        assert record[112:] == struct.pack("<I", unpack(data).records[index].split) + bytes(12)
        assert data[offset : offset + size] == unpack(data).images[index]
    first = data[64:192]
    assert first[:64] == b"bwd-sm80-bf16-d64-full".ljust(64, b"\0")
    assert first[64:72] == b"ptx80".ljust(8, b"\0")
    assert struct.unpack_from("<6I", first, 72) == (64, 64, 64, 256, 82944, 0)
    assert first[112:116] == b"\1\0\0\0"
    assert len(data) % 64 == 0


def test_empty_set():
    assert unpack(pack(COMPILER, [])).records == ()


def test_names_that_do_not_fit():
    with pytest.raises(ArchiveError, match="64 characters; the archive has room for 63"):
        pack(COMPILER, [(Record("k" * 64, "90", 1, 1, 1, 1, 1, 1), b"")])
    with pytest.raises(ArchiveError, match="is there twice"):
        pack(COMPILER, [RECORDS[0], RECORDS[0]])


def test_every_truncation_is_refused():
    data = pack(COMPILER, RECORDS).rstrip(b"\0")  # the last image has no NUL at its end
    for size in range(len(data)):
        with pytest.raises(ArchiveError):
            unpack(data[:size])


def test_a_flipped_byte_of_the_index_is_refused_or_read_as_written():
    data = pack(COMPILER, RECORDS)
    for position in range(64 + 128 * 3):
        damaged = bytearray(data)
        damaged[position] ^= 0xFF
        try:
            unpack(bytes(damaged))
        except ArchiveError:
            continue  # no other exception may come


def test_damage_is_described(tmp_path):
    with pytest.raises(ArchiveError, match="is not a kernel set"):
        unpack(b"PK\3\4" + bytes(100))
    newer = bytearray(pack(COMPILER, RECORDS))
    newer[8] = 2
    with pytest.raises(ArchiveError, match=r"is of format 2[\s\S]*of one wheel"):
        unpack(bytes(newer))
    with pytest.raises(ArchiveError, match="cannot be read: No such file"):
        read(tmp_path / "flash_attn.kernels")


def test_atomic_write_leaves_nothing_behind_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "set"
    path.write_bytes(b"old")

    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(archive.os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, b"new")
    assert [item.name for item in tmp_path.iterdir()] == ["set"]
    assert path.read_bytes() == b"old"
