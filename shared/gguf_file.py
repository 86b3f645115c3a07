"""The head of a GGUF file: metadata and tensor table, without the weights (GGUF specification v3).

The `gguf` package's reader makes a numpy view per string: 6 s for the 98,000 strings of a small
vocabulary, in each process of the mesh. This reads the same head in 0.1 s and refuses a broken file
by the name of the key or tensor that is broken.
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_MAX_DIMS = 4
_MAX_DEPTH = 2  # arrays of arrays

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
        raw = self.take(self.scalar("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"not UTF-8: {error}") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth == _MAX_DEPTH:
            raise self.error(f"unknown value type {kind}")
        item, count = self.scalar("I"), self.scalar("Q")
        if item in _SCALARS:
            raw = self.take(count * struct.calcsize("<" + _SCALARS[item]))
            return list(struct.unpack(f"<{count}{_SCALARS[item]}", raw))
        if count > len(self.data) - self.at:  # an item is at least a byte
            raise self.error(f"truncated: {count} items announced")
        return [self.value(item, depth + 1) for _ in range(count)]


def read_gguf(file: Path) -> GgufHead:
    """The head of `file`. Raises `ModelFileError`; reads no weights, but knows where they end."""
    try:
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
        cursor.what = f"key {number} of {num_keys}"
        cursor.what = key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    places: dict[str, TensorInfo] = {}
    for number in range(num_tensors):
        cursor.what = f"tensor {number} of {num_tensors}"
        cursor.what = name = cursor.string()
        dims = cursor.scalar("I")
        if dims > _MAX_DIMS:
            raise cursor.error(f"{dims} dimensions")
        shape = tuple(cursor.scalar("Q") for _ in range(dims))[::-1]  # GGUF: innermost first
        places[name] = TensorInfo(shape, cursor.scalar("I"), cursor.scalar("Q"))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelFileError(cursor.file, "general.alignment", f"{alignment!r}")
    base = math.ceil(cursor.at / alignment) * alignment
    size = len(cursor.data)
    tensors = {name: place._replace(offset=base + place.offset) for name, place in places.items()}
    for name, tensor in tensors.items():
        end = tensor.offset + tensor.num_bytes
        if end > size:
            reason = f"truncated: ends at byte {end}, the file has {size}"
            raise ModelFileError(cursor.file, name, reason)
    return GgufHead(metadata, tensors)
