"""Named arrays in one file, to be mapped where they lie: all who map it share its pages.

    magic | checksum and length of the table | table as JSON | arrays, each from a whole line on

Every byte is under a CRC-32: any flipped bit and any burst of 32 shows, what somebody writes with
intent does not. Checking costs 0.3 ms per MB.
"""

import math
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from services.gpu_worker.loader.mapped import MappedFile
from shared.gguf_file import ModelFileError

Arrays = Mapping[str, NDArray[Any]]

_MAGIC = b"shoal arrays 1\r\n"
_HEAD = struct.Struct("<16sII")
_LINE = 64  # bytes: of a cache line, and of what one instruction loads


class Damaged(Exception):
    """A file is not what was written under this key; the text says where."""


class _Entry(Struct, array_like=True, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    checksum: int  # of the array and of the zeros up to the next

    @property
    def num_bytes(self) -> int:
        """Without the zeros."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class _Table(Struct, array_like=True, frozen=True):
    """Arrays lie in the order of their entries."""

    key: str
    entries: dict[str, _Entry]


def write_arrays(file: BinaryIO, key: str, arrays: Arrays) -> None:
    """Raises `OSError`."""
    entries = {name: _entry(array) for name, array in arrays.items()}
    table = msgspec.json.encode(_Table(key, entries))
    table += b" " * _gap(_HEAD.size + len(table))
    file.write(_HEAD.pack(_MAGIC, zlib.crc32(table), len(table)) + table)
    for array in arrays.values():
        file.write(array.data)
        file.write(bytes(_gap(array.nbytes)))


def map_arrays(path: Path, key: str) -> Arrays:
    """The arrays of a file as read-only views, valid whatever becomes of its name. Raises `Damaged`
    for one that does not hold exactly what was written under `key`, `OSError` for none.
    """
    path.stat()
    try:
        file = MappedFile(path)
    except ModelFileError as error:
        raise Damaged(error.reason) from error
    table, at = _table(file)
    if table.key != key:
        raise Damaged("another key")
    arrays = {}
    for name, entry in table.entries.items():
        size = entry.num_bytes
        raw = _checked(file, at, size + _gap(size), entry.checksum, name)
        arrays[name] = raw[:size].view(entry.dtype).reshape(entry.shape)
        at += len(raw)
    if at != file.size:
        raise Damaged(f"{file.size} bytes, not {at}")
    return arrays


def _entry(array: NDArray[Any]) -> _Entry:
    assert array.flags.c_contiguous
    checksum = zlib.crc32(bytes(_gap(array.nbytes)), zlib.crc32(array.data))
    return _Entry(array.dtype.name, array.shape, checksum)


def _table(file: MappedFile) -> tuple[_Table, int]:
    """And where it ends."""
    if file.size < _HEAD.size:
        raise Damaged("head: truncated")
    magic, checksum, size = _HEAD.unpack(file.view(0, _HEAD.size).data)
    if magic != _MAGIC:
        raise Damaged("head: not ours, or of another version")
    raw = _checked(file, _HEAD.size, size, checksum, "table")
    return msgspec.json.decode(raw.data, type=_Table), _HEAD.size + size


def _checked(
    file: MappedFile, start: int, size: int, checksum: int, what: str
) -> NDArray[np.uint8]:
    if start + size > file.size:
        raise Damaged(f"{what}: truncated")
    raw = file.view(start, start + size)
    if zlib.crc32(raw.data) != checksum:
        raise Damaged(f"{what}: checksum")
    return raw


def _gap(size: int) -> int:
    """Bytes from `size` to the next whole line."""
    return -size % _LINE
