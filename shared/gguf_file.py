"""The head of a GGUF file: metadata and tensor table, without the weights (GGUF specification v3).

The `gguf` package's reader makes a numpy view per string: 6 s for the 98,000 strings of a small
vocabulary, in each process of the mesh. This reads the same head in 0.1 s and refuses a broken file
by the name of the key or tensor that is broken.
"""

import contextlib
import math
import mmap
import struct
from collections.abc import Container
from pathlib import Path
from typing import Any, NamedTuple

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_MAX_DIMS = 4
_MAX_DEPTH = 2  # arrays of arrays
_MAX_ITEMS = 1 << 23  # of an array; the largest vocabularies have 3 * 10^5 tokens
_MAX_STRING_BYTES = 1 << 26

_SCALARS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))  # struct codes
_STRING, _ARRAY = 8, 9

_BLOCKS = {  # ggml type -> (elements, bytes) of one block
    0: (1, 4),  # F32
    1: (1, 2),  # F16
    2: (32, 18),  # Q4_0
    3: (32, 20),  # Q4_1
    6: (32, 22),  # Q5_0
    7: (32, 24),  # Q5_1
    8: (32, 34),  # Q8_0
    10: (256, 84),  # Q2_K
    11: (256, 110),  # Q3_K
    12: (256, 144),  # Q4_K
    13: (256, 176),  # Q5_K
    14: (256, 210),  # Q6_K
    30: (1, 2),  # BF16
}


class ModelFileError(Exception):
    """A model file cannot be used. `what` names the key, tensor or part of the file at fault."""

    def __init__(self, file: Path | str, what: str, reason: str) -> None:
        super().__init__(f"{file}: {what}: {reason}")
        self.file = str(file)
        self.what = what
        self.reason = reason


class TensorInfo(NamedTuple):
    """Where a tensor lies. `shape` is row-major (outermost first)."""

    shape: tuple[int, ...]
    ggml_type: int
    offset: int  # from the start of the file

    @property
    def block(self) -> int:
        """How many elements of a row are stored together; 1 for a type that is not known here."""
        return _BLOCKS.get(self.ggml_type, (1, 0))[0]

    @property
    def num_bytes(self) -> int:
        """How long its data is; 0 for a type that is not known here."""
        elements, size = _BLOCKS.get(self.ggml_type, (1, 0))
        return math.prod(self.shape) // elements * size


class GgufHead(NamedTuple):
    """What stands before the weights."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class _Cursor:
    """A position in the mapped file; every read is checked against its end."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self.file, self.data, self.at = file, data, 0
        self.what = "header"  # what is being read, for the error

    def error(self, reason: str) -> ModelFileError:
        return ModelFileError(self.file, self.what, reason)

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            raise self.error(f"truncated: needs byte {end}, the file has {len(self.data)}")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        size = self.scalar("Q")
        if size > _MAX_STRING_BYTES:
            raise self.error(f"a string of {size} bytes, more than {_MAX_STRING_BYTES}")
        raw = self.take(size)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"not UTF-8: {error}") from error

    def strings(self, count: int) -> list[str]:
        """As `string`, without a call for each piece: a vocabulary has 98,000 of them."""
        data, at, found = self.data, self.at, []
        with contextlib.suppress(UnicodeDecodeError):
            for _ in range(count):
                start = at + 8
                stop = start + int.from_bytes(data[at:start], "little")
                if stop > len(data) or stop - start > _MAX_STRING_BYTES:
                    break
                found.append(data[start:stop].decode())
                at = stop
        self.at = at
        if len(found) < count:
            self.string()  # says what is wrong with the next
        return found

    def name(self, what: str, taken: Container[str]) -> str:
        """The name of the next key or tensor, which errors name from then on."""
        self.what = what
        name = self.string()
        if not name:
            raise self.error("has no name")
        self.what = name
        if name in taken:
            raise self.error("named twice")
        return name

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth == _MAX_DEPTH:
            raise self.error(f"unknown value type {kind}")
        item, count = self.scalar("I"), self.scalar("Q")
        if count > _MAX_ITEMS:
            raise self.error(f"an array of {count} items, more than {_MAX_ITEMS}")
        if item in _SCALARS:
            raw = self.take(count * struct.calcsize("<" + _SCALARS[item]))
            return list(struct.unpack(f"<{count}{_SCALARS[item]}", raw))
        if item == _STRING:
            return self.strings(count)
        return [self.value(item, depth + 1) for _ in range(count)]


def read_gguf(file: Path) -> GgufHead:
    """The head of `file`. Raises `ModelFileError`; reads no weights, but knows where they end."""
    try:
        if not file.is_file():  # opening a pipe would wait for a writer
            raise ModelFileError(file, "file", "missing, or no regular file")
        with file.open("rb") as opened:
            data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelFileError(file, "file", str(error)) from error
    with data:
        return _read_head(_Cursor(file, data))


def _read_head(cursor: _Cursor) -> GgufHead:
    if cursor.data[:4] != MAGIC:
        raise cursor.error(f"not a GGUF file: starts with {cursor.data[:4]!r}")
    cursor.take(4)
    version = cursor.scalar("I")
    if version not in VERSIONS:
        raise cursor.error(f"GGUF version {version} (or byte order) is not supported")
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for number in range(num_keys):
        key = cursor.name(f"key {number} of {num_keys}", metadata)
        metadata[key] = cursor.value(cursor.scalar("I"))
    places: dict[str, TensorInfo] = {}
    for number in range(num_tensors):
        name = cursor.name(f"tensor {number} of {num_tensors}", places)
        dims = cursor.scalar("I")
        if dims > _MAX_DIMS:
            raise cursor.error(f"{dims} dimensions")
        shape = tuple(cursor.scalar("Q") for _ in range(dims))[::-1]  # GGUF: innermost first
        places[name] = TensorInfo(shape, cursor.scalar("I"), cursor.scalar("Q"))
    return GgufHead(metadata, _placed(cursor, places, metadata.get("general.alignment", 32)))


def _placed(
    cursor: _Cursor, places: dict[str, TensorInfo], alignment: object
) -> dict[str, TensorInfo]:
    """The tensors, their offsets counted from the start of the file."""
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelFileError(cursor.file, "general.alignment", f"{alignment!r}")
    base = math.ceil(cursor.at / alignment) * alignment
    size = len(cursor.data)
    taken = base
    for name, place in sorted(places.items(), key=lambda item: item[1].offset):
        begin = base + place.offset
        end = begin + place.num_bytes
        if place.offset % alignment:
            reason = f"offset {place.offset} is no multiple of {alignment}"
            raise ModelFileError(cursor.file, name, reason)
        if begin < taken:
            reason = f"overlaps another: begins at byte {begin}, before {taken}"
            raise ModelFileError(cursor.file, name, reason)
        if end > size:
            reason = f"truncated: ends at byte {end}, the file has {size}"
            raise ModelFileError(cursor.file, name, reason)
        taken = end
    return {name: place._replace(offset=base + place.offset) for name, place in places.items()}
