"""Weights from a GGUF file, memory-mapped and dequantized piece by piece."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.gpu_worker.loader.assemble import assemble
from services.gpu_worker.loader.gguf_config import (
    MAX_HEAD_DIM,
    RopeFactors,
    decoder_config,
    family_of,
    names_of,
)
from services.gpu_worker.loader.mapped import MappedFile
from services.gpu_worker.models.decoder import DecoderConfig, DecoderWeights
from shared.gguf_file import GgufHead, ModelFileError, read_gguf

_FORMATS = {  # ggml type -> what it is called
    0: "F32",
    1: "F16",
    30: "BF16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
}


def load(file: Path, dtype: torch.dtype) -> tuple[DecoderConfig, DecoderWeights]:
    """See `load_model`."""
    head = read_gguf(file)
    if head.metadata.get("split.count", 1) not in (0, 1):
        reason = f"{head.metadata['split.count']}: split files are not read, merge them first"
        raise ModelFileError(file, "split.count", reason)
    tensors = _Tensors(file, head)
    factors = RopeFactors(*(tensors.vector(name) for name in RopeFactors._fields))
    config = decoder_config(file, head.metadata, factors)
    if head.metadata["general.architecture"] == "llama":
        tensors.head_dim = config.head_dim
    names = names_of(family_of(file, head.metadata), {*head.tensors})
    tied = "output.weight" not in head.tensors
    weights = assemble(tensors, names, config, tied, dtype)
    tensors.refuse_unused()
    return config, weights


class _Tensors:
    """Tensors of one mapped file by name."""

    def __init__(self, file: Path, head: GgufHead) -> None:
        self._file = file
        self._infos = head.tensors
        self._unused = {*head.tensors}
        self._mapped = MappedFile(file)
        self.head_dim = 0  # set if queries and keys are in interleaved rotary order

    def vector(self, name: str) -> tuple[float, ...]:
        """A vector of the file as it is; () if there is none."""
        info = self._infos.get(f"{name}.weight")
        if info is None:
            return ()
        if len(info.shape) != 1 or info.shape[0] > MAX_HEAD_DIM:
            reason = f"shape {list(info.shape)}, expected one dim of at most {MAX_HEAD_DIM}"
            raise ModelFileError(self._file, f"{name}.weight", reason)
        self.check(f"{name}.weight", info.shape)
        values = torch.empty(info.shape)
        self.read(f"{name}.weight", values)
        return tuple(values.tolist())

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        info = self._infos.get(name)
        if info is None:
            raise ModelFileError(self._file, name, "missing")
        if info.shape != shape:
            reason = f"shape {list(info.shape)}, expected {list(shape)}"
            raise ModelFileError(self._file, name, reason)
        if info.ggml_type not in _FORMATS:
            known = ", ".join(_FORMATS.values())
            reason = f"ggml type {info.ggml_type} is not supported, only {known}"
            raise ModelFileError(self._file, name, reason)
        if shape[-1] % info.block:
            kind = _FORMATS[info.ggml_type]
            reason = f"rows of {shape[-1]} are no whole {kind} blocks of {info.block}"
            raise ModelFileError(self._file, name, reason)
        self._unused.discard(name)

    def refuse_unused(self) -> None:
        """A tensor that nobody asked for: the file is of a model that computes more than ours."""
        for name in sorted(self._unused):
            raise ModelFileError(self._file, name, "not a tensor of this architecture")

    def read(self, name: str, into: Tensor) -> None:
        info = self._infos[name]
        rows = into if into.dim() > 1 else into[None]
        pieces = self._mapped.rows(info.offset, len(rows), info.num_bytes // len(rows))
        for which, raw in pieces:
            rows[which].copy_(torch.from_numpy(_values(raw, info.ggml_type)))
        turned = name.removesuffix(".weight").removesuffix(".bias").endswith(("attn_q", "attn_k"))
        if turned and self.head_dim:
            into.copy_(_half_rotation(into, self.head_dim))


def _values(raw: NDArray[np.uint8], ggml_type: int) -> NDArray[np.float32]:
    """Rows of a tensor in fp32, to be written to."""
    if _FORMATS[ggml_type] == "F32":
        return raw.view(np.float32).copy()
    # 0.2 s, which a worker saves that finds its weights packed.
    from gguf.constants import GGMLQuantizationType  # noqa: PLC0415
    from gguf.quants import dequantize  # noqa: PLC0415

    with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale shows as NaN logits
        return np.array(dequantize(raw, GGMLQuantizationType(ggml_type)), dtype=np.float32)


def _half_rotation(weight: Tensor, head_dim: int) -> Tensor:
    """GGUF orders the rows of a Llama's head for rotary pairs (2i, 2i + 1); ours are
    (i, i + head_dim / 2).
    """
    pairs = weight.view(-1, head_dim // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
