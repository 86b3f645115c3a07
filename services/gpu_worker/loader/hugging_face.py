"""Weights from a Hugging Face directory: config.json and safetensors, sharded or not."""

from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.gpu_worker.loader.assemble import Names, assemble
from services.gpu_worker.models.llama import LlamaConfig, LlamaWeights
from shared.gguf_file import ModelFileError
from shared.model_files import read_json

_Positive = Annotated[int, Meta(gt=0)]
_DTYPES = ("F32", "F16", "BF16")
_NAMES = Names(
    embedding="model.embed_tokens",
    norm="model.norm",
    lm_head="lm_head",
    layer="model.layers.{}.",
    attention_norm="input_layernorm",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    attention_out="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
)


class _Config(Struct):
    """The part of config.json that decides what is computed."""

    model_type: str
    vocab_size: _Positive
    hidden_size: _Positive
    intermediate_size: _Positive
    num_hidden_layers: _Positive
    num_attention_heads: _Positive
    max_position_embeddings: _Positive
    rms_norm_eps: float
    num_key_value_heads: _Positive | None = None
    head_dim: _Positive | None = None
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None  # newer files: rope_theta and the scaling
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False


class _Index(Struct):
    weight_map: dict[str, str]


def load(folder: Path, dtype: torch.dtype) -> tuple[LlamaConfig, LlamaWeights]:
    """See `load_llama`."""
    file = folder / "config.json"
    raw: _Config = read_json(file, _Config)
    config = _llama_config(file, raw)
    tensors = _Tensors(folder)
    return config, assemble(tensors, _NAMES, config, raw.tie_word_embeddings, dtype)


def _llama_config(file: Path, raw: _Config) -> LlamaConfig:
    def refuse(key: str, value: object, only: str) -> ModelFileError:
        return ModelFileError(file, key, f"{value!r} is not supported, only {only}")

    if raw.model_type != "llama":
        raise refuse("model_type", raw.model_type, "'llama'")
    if raw.hidden_act != "silu":
        raise refuse("hidden_act", raw.hidden_act, "'silu'")
    for key in ("attention_bias", "mlp_bias"):
        if getattr(raw, key):
            raise refuse(key, True, "false")
    rope = raw.rope_parameters or raw.rope_scaling or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise refuse("rope_scaling", kind, "'default'")
    kv_heads = raw.num_key_value_heads or raw.num_attention_heads
    if raw.num_attention_heads % kv_heads:
        raise refuse("num_key_value_heads", kv_heads, f"a divisor of {raw.num_attention_heads}")
    return LlamaConfig(
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        inner_size=raw.intermediate_size,
        num_layers=raw.num_hidden_layers,
        num_heads=raw.num_attention_heads,
        num_kv_heads=kv_heads,
        head_dim=raw.head_dim or raw.hidden_size // raw.num_attention_heads,
        rms_eps=raw.rms_norm_eps,
        rope_base=rope.get("rope_theta", raw.rope_theta),
        context_length=raw.max_position_embeddings,
    )


class _Tensors:
    """Tensors of a directory by name; files stay mapped while they are read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
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
        return tensor

    def _open(self, name: str) -> Any:
        file = self._folder / name
        if Path(name).name != name:
            raise ModelFileError(self._folder, name, "a shard outside the directory")
        try:
            return safe_open(file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ModelFileError(file, "file", str(error)) from error
