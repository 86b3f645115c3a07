"""Weights from a GGUF file, memory-mapped and dequantized tensor by tensor."""

from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from services.gpu_worker.loader.assemble import assemble
from services.gpu_worker.loader.gguf_config import decoder_config, family_of, names_of
from services.gpu_worker.models.decoder import DecoderConfig, DecoderWeights
from shared.gguf_file import GgufHead, ModelFileError, read_gguf

_ROPE_DIVISORS = "rope_freqs.weight"  # Llama 3.1's scaling, worked out
_FORMATS = {
    kind.value: kind
    for kind in (
        GGMLQuantizationType.F32,
        GGMLQuantizationType.F16,
        GGMLQuantizationType.BF16,
        GGMLQuantizationType.Q4_0,
        GGMLQuantizationType.Q4_1,
        GGMLQuantizationType.Q5_0,
        GGMLQuantizationType.Q5_1,
        GGMLQuantizationType.Q8_0,
        GGMLQuantizationType.Q4_K,
        GGMLQuantizationType.Q5_K,
        GGMLQuantizationType.Q6_K,
    )
}


def load(file: Path, dtype: torch.dtype) -> tuple[DecoderConfig, DecoderWeights]:
    """See `load_model`."""
    head = read_gguf(file)
    tensors = _Tensors(file, head)
    config = decoder_config(file, head.metadata, tensors.rope_divisors())
    if head.metadata["general.architecture"] == "llama":
        tensors.head_dim = config.head_dim
    names = names_of(family_of(file, head.metadata), {*head.tensors})
    tied = "output.weight" not in head.tensors
    return config, assemble(tensors, names, config, tied, dtype)


class _Tensors:
    """Tensors of one mapped file by name, as fp32."""

    def __init__(self, file: Path, head: GgufHead) -> None:
        self._file = file
        self._infos = head.tensors
        self._bytes = np.memmap(file, mode="r")
        self.head_dim = 0  # set if queries and keys are in interleaved rotary order

    def rope_divisors(self) -> tuple[float, ...]:
        info = self._infos.get(_ROPE_DIVISORS)
        if info is None:
            return ()
        self.check(_ROPE_DIVISORS, info.shape)
        return tuple(self.read(_ROPE_DIVISORS).flatten().tolist())

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        info = self._infos.get(name)
        if info is None:
            raise ModelFileError(self._file, name, "missing")
        if info.shape != shape:
            reason = f"shape {list(info.shape)}, expected {list(shape)}"
            raise ModelFileError(self._file, name, reason)
        if info.ggml_type not in _FORMATS:
            known = ", ".join(kind.name for kind in _FORMATS.values())
            reason = f"ggml type {info.ggml_type} is not supported, only {known}"
            raise ModelFileError(self._file, name, reason)
        kind = _FORMATS[info.ggml_type]
        block, _ = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            reason = f"rows of {shape[-1]} are no whole {kind.name} blocks of {block}"
            raise ModelFileError(self._file, name, reason)

    def read(self, name: str) -> Tensor:
        info = self._infos[name]
        raw = self._bytes[info.offset : info.offset + info.num_bytes]
        rows = raw.reshape(info.shape[0], -1) if len(info.shape) > 1 else raw
        # dequantize returns a view of the file for F32; the copy makes it ours and writable.
        with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale shows as NaN logits
            values = np.array(dequantize(rows, _FORMATS[info.ggml_type]), dtype=np.float32)
        tensor = torch.from_numpy(values.reshape(info.shape))
        turned = name.removesuffix(".weight").removesuffix(".bias").endswith(("attn_q", "attn_k"))
        return _half_rotation(tensor, self.head_dim) if turned and self.head_dim else tensor


def _half_rotation(weight: Tensor, head_dim: int) -> Tensor:
    """GGUF orders the rows of a Llama's head for rotary pairs (2i, 2i + 1); ours are
    (i, i + head_dim / 2).
    """
    pairs = weight.view(-1, head_dim // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
