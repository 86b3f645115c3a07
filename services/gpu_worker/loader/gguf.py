"""Weights from a GGUF file, memory-mapped and dequantized tensor by tensor."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from services.gpu_worker.loader.assemble import Names, assemble
from services.gpu_worker.models.llama import LlamaConfig, LlamaWeights
from shared.gguf_file import GgufHead, ModelFileError, read_gguf

_FORMATS = {
    kind.value: kind
    for kind in (
        GGMLQuantizationType.F32,
        GGMLQuantizationType.F16,
        GGMLQuantizationType.BF16,
        GGMLQuantizationType.Q4_0,
        GGMLQuantizationType.Q4_1,
        GGMLQuantizationType.Q8_0,
    )
}

_NAMES = Names(
    embedding="token_embd",
    norm="output_norm",
    lm_head="output",
    layer="blk.{}.",
    attention_norm="attn_norm",
    query="attn_q",
    key="attn_k",
    value="attn_v",
    attention_out="attn_output",
    mlp_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
)


def load(file: Path, dtype: torch.dtype) -> tuple[LlamaConfig, LlamaWeights]:
    """See `load_llama`."""
    head = read_gguf(file)
    config = _config(file, head)
    tensors = _Tensors(file, head, config.head_dim)
    tied = "output.weight" not in head.tensors
    return config, assemble(tensors, _NAMES, config, tied, dtype)


def _config(file: Path, head: GgufHead) -> LlamaConfig:
    metadata = head.metadata
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        reason = f"{architecture!r} is not supported, only 'llama' is"
        raise ModelFileError(file, "general.architecture", reason)

    def number(key: str, kind: type[Any], default: Any = None) -> Any:
        value = metadata.get(f"llama.{key}", default)
        if isinstance(value, bool) or not isinstance(value, kind) or value <= 0:
            reason = "missing" if value is None else f"{value!r} is not a positive {kind.__name__}"
            raise ModelFileError(file, f"llama.{key}", reason)
        return value

    heads, hidden = number("attention.head_count", int), number("embedding_length", int)
    config = LlamaConfig(
        vocab_size=len(metadata.get("tokenizer.ggml.tokens", ())) or number("vocab_size", int),
        hidden_size=hidden,
        inner_size=number("feed_forward_length", int),
        num_layers=number("block_count", int),
        num_heads=heads,
        num_kv_heads=number("attention.head_count_kv", int, heads),
        head_dim=number("attention.key_length", int, hidden // heads),
        rms_eps=number("attention.layer_norm_rms_epsilon", float),
        rope_base=number("rope.freq_base", float, 10_000.0),
        context_length=number("context_length", int),
    )
    if config.num_heads % config.num_kv_heads:
        reason = f"{config.num_kv_heads} does not divide {config.num_heads} heads"
        raise ModelFileError(file, "llama.attention.head_count_kv", reason)
    turned = metadata.get("llama.rope.dimension_count", config.head_dim)
    if turned != config.head_dim:
        reason = f"{turned}: only whole heads of {config.head_dim} are supported"
        raise ModelFileError(file, "llama.rope.dimension_count", reason)
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in head.tensors:
        raise ModelFileError(file, "llama.rope.scaling.type", "scaled rotary is not supported")
    if metadata.get("llama.expert_count", 0):
        raise ModelFileError(file, "llama.expert_count", "mixtures of experts are not supported")
    return config


class _Tensors:
    """Tensors of one mapped file by name, as fp32."""

    def __init__(self, file: Path, head: GgufHead, head_dim: int) -> None:
        self._file = file
        self._head_dim = head_dim
        self._infos = head.tensors
        self._bytes = np.memmap(file, mode="r")

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

    def read(self, name: str) -> Tensor:
        info = self._infos[name]
        raw = self._bytes[info.offset : info.offset + info.num_bytes]
        rows = raw.reshape(info.shape[0], -1) if len(info.shape) > 1 else raw
        # dequantize returns a view of the file for F32; the copy makes it ours and writable.
        values = np.array(dequantize(rows, _FORMATS[info.ggml_type]), dtype=np.float32)
        tensor = torch.from_numpy(values.reshape(info.shape))
        turned = name.endswith(("attn_q.weight", "attn_k.weight"))
        return _half_rotation(tensor, self._head_dim) if turned else tensor


def _half_rotation(weight: Tensor, head_dim: int) -> Tensor:
    """GGUF orders a head's rows for rotary pairs (2i, 2i + 1); ours are (i, i + head_dim / 2)."""
    pairs = weight.view(-1, head_dim // 2, 2, weight.shape[-1])
    return pairs.transpose(1, 2).reshape(weight.shape)
