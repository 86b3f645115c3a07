"""The safetensors files of a Hugging Face directory, memory-mapped, sharded or not.

A file is the length of its header as a u64, the header as JSON (name -> dtype, shape, place of the
data) and the data, without holes. (https://github.com/huggingface/safetensors#format)
"""

import math
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Meta, Struct
from torch import Tensor

from services.gpu_worker.loader.mapped import MappedFile
from shared.gguf_file import ModelFileError
from shared.model_files import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_HEADER_BYTES_MAX = 100_000_000  # as the format's own reader
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BITS = {"F32": 32, "F16": 16, "BF16": 16, "F64": 64, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8} | {
    f"{sign}{bits}": bits for sign in "IU" for bits in (8, 16, 32, 64)
}
_Count = Annotated[int, Meta(ge=0, le=1 << 60)]


class _Index(Struct):
    weight_map: dict[str, str]


class _Entry(Struct):
    """One tensor in a header."""

    dtype: str
    shape: Annotated[list[_Count], Meta(max_length=8)]
    data_offsets: tuple[_Count, _Count]  # from the end of the header


class _Place(NamedTuple):
    file: MappedFile
    dtype: str
    shape: tuple[int, ...]
    start: int  # from the start of the file
    stop: int


class SafeTensors:
    """Tensors of a directory by name. Raises `ModelFileError`.

    Gemma's files hold norms less one: `norm_offset` is added to what is called a norm.
    """

    def __init__(self, folder: Path, norm_offset: float) -> None:
        self._folder = folder
        self._norm_offset = norm_offset
        named = _shards(folder)
        self._places: dict[str, _Place] = {}
        for shard in sorted({*named.values()}) or [SINGLE]:
            for name, place in _read_head(MappedFile(folder / shard)).items():
                if name in self._places:
                    reason = f"also in {self._places[name].file.file.name}"
                    raise ModelFileError(folder / shard, name, reason)
                self._places[name] = place
        for name, shard in named.items():
            if name not in self._places or self._places[name].file.file.name != shard:
                raise ModelFileError(folder / shard, name, "missing, though the index names it")

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        place = self._places.get(name)
        if place is None:
            raise ModelFileError(self._folder, name, "missing")
        if place.shape != shape:
            reason = f"shape {list(place.shape)}, expected {list(shape)}"
            raise ModelFileError(place.file.file, name, reason)
        if place.dtype not in _DTYPES:
            reason = f"dtype {place.dtype} is not supported, only {', '.join(_DTYPES)}"
            raise ModelFileError(place.file.file, name, reason)

    def read(self, name: str, into: Tensor) -> None:
        place = self._places[name]
        rows = into if into.dim() > 1 else into[None]
        row_bytes = (place.stop - place.start) // len(rows)
        for which, raw in place.file.rows(place.start, len(rows), row_bytes):
            # Data may lie at any byte, and a mapped page is read-only: the copy is neither.
            rows[which].copy_(torch.from_numpy(raw.copy()).view(_DTYPES[place.dtype]))
        if self._norm_offset and name.endswith("norm.weight"):
            into += self._norm_offset

    def same(self, name: str, other: str) -> bool:
        """Whether both are there and hold the same bytes."""
        one, two = self._places.get(name), self._places.get(other)
        if one is None or two is None or one[1:3] != two[1:3]:
            return False
        if one.stop - one.start != two.stop - two.start:  # of a dtype whose size is not known
            return False
        pieces = zip(
            one.file.rows(one.start, one.stop - one.start, 1),
            two.file.rows(two.start, two.stop - two.start, 1),
            strict=True,
        )
        return all(np.array_equal(mine, theirs) for (_, mine), (_, theirs) in pieces)

    def __contains__(self, name: str) -> bool:
        return name in self._places


def _shards(folder: Path) -> dict[str, str]:
    """Tensor -> shard as the index says; {} = all are in the single file."""
    if (folder / SINGLE).exists():  # which wins over an index, as in the library that writes both
        return {}
    if (folder / INDEX).exists():
        index: _Index = read_json(folder / INDEX, _Index)
        if not index.weight_map:
            raise ModelFileError(folder / INDEX, "weight_map", "names no tensor")
        for shard in {*index.weight_map.values()}:
            if shard in ("", ".", "..") or Path(shard).name != shard:
                reason = f"{shard!r}: a shard outside the directory"
                raise ModelFileError(folder / INDEX, "weight_map", reason)
        return index.weight_map
    pickled = sorted(f.name for kind in ("*.bin", "*.pt", "*.pth") for f in folder.glob(kind))
    if pickled:
        reason = (
            f"pickled weights ({pickled[0]}) are not read, since reading them can run code; write "
            "them as safetensors: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
        raise ModelFileError(folder, SINGLE, reason)
    raise ModelFileError(folder, SINGLE, f"missing, and so is {INDEX}")


def _read_head(file: MappedFile) -> dict[str, _Place]:
    """Where the tensors of one file lie; their data fills the file exactly."""
    size = int.from_bytes(file.view(0, min(8, file.size)).tobytes(), "little")
    begin = 8 + size
    if file.size < 8 or size > _HEADER_BYTES_MAX or begin > file.size:
        raise ModelFileError(file.file, "header", f"{size} bytes announced in {file.size}")
    try:
        entries = msgspec.json.decode(file.view(8, begin).tobytes(), type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ModelFileError(file.file, "header", str(error)) from error
    entries.pop("__metadata__", None)
    places = {name: _place(file, name, raw, begin) for name, raw in entries.items()}
    expected = begin
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].stop)):
        if place.start != expected:
            fault = "overlaps another" if place.start < expected else "follows a hole"
            raise ModelFileError(file.file, name, f"{fault}: {place.start}, not {expected}")
        expected = place.stop
    if expected != file.size:
        raise ModelFileError(file.file, "file", f"{file.size} bytes, the header says {expected}")
    return places


def _place(file: MappedFile, name: str, raw: msgspec.Raw, begin: int) -> _Place:
    try:
        entry = msgspec.json.decode(raw, type=_Entry)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ModelFileError(file.file, name, str(error)) from error
    start, stop = entry.data_offsets
    if begin + stop > file.size:
        reason = f"truncated: ends at byte {begin + stop}, the file has {file.size}"
        raise ModelFileError(file.file, name, reason)
    if stop < start:
        raise ModelFileError(file.file, name, f"ends at {stop}, before its start {start}")
    bits = _BITS.get(entry.dtype)
    if bits and math.prod(entry.shape) * bits != 8 * (stop - start):
        reason = f"{stop - start} bytes for {entry.dtype} {entry.shape}"
        raise ModelFileError(file.file, name, reason)
    return _Place(file, entry.dtype, tuple(entry.shape), begin + start, begin + stop)
