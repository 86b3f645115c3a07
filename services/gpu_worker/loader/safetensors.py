"""The safetensors files of a Hugging Face directory, memory-mapped, sharded or not."""

from pathlib import Path
from typing import Any

from msgspec import Struct
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.gguf_file import ModelFileError
from shared.model_files import read_json

_DTYPES = ("F32", "F16", "BF16")


class _Index(Struct):
    weight_map: dict[str, str]


class SafeTensors:
    """Tensors of a directory by name; files stay mapped while they are read.

    Gemma's files hold norms less one: `norm_offset` is added to what is called a norm.
    """

    def __init__(self, folder: Path, norm_offset: float) -> None:
        self._folder = folder
        self._norm_offset = norm_offset
        index = folder / "model.safetensors.index.json"
        if index.exists():
            shards: _Index = read_json(index, _Index)
            self._shards = shards.weight_map
            files = sorted({*shards.weight_map.values()})
        else:
            self._shards = {}
            files = ["model.safetensors"]
        self._files = {name: self._open(name) for name in files}
        if not self._shards:
            self._shards = dict.fromkeys(self._files[files[0]].keys(), files[0])

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        file = self._shards.get(name)
        if file is None:
            raise ModelFileError(self._folder, name, "missing")
        opened = self._files[file]
        if name not in opened.keys():  # noqa: SIM118 - not a mapping
            raise ModelFileError(self._folder / file, name, "missing, though the index names it")
        found = opened.get_slice(name)
        if tuple(found.get_shape()) != shape:
            reason = f"shape {found.get_shape()}, expected {list(shape)}"
            raise ModelFileError(self._folder / file, name, reason)
        if found.get_dtype() not in _DTYPES:
            reason = f"dtype {found.get_dtype()} is not supported, only {', '.join(_DTYPES)}"
            raise ModelFileError(self._folder / file, name, reason)

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._files[self._shards[name]].get_tensor(name)
        if self._norm_offset and name.endswith("norm.weight"):
            return tensor.float() + self._norm_offset
        return tensor

    def _open(self, name: str) -> Any:
        file = self._folder / name
        if Path(name).name != name:
            raise ModelFileError(self._folder, name, "a shard outside the directory")
        try:
            return safe_open(file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ModelFileError(file, "file", str(error)) from error
