"""From named tensors of a file to `LlamaWeights`; what GGUF and safetensors have in common."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from services.gpu_worker.models.llama import LayerWeights, LlamaConfig, LlamaWeights


class Names(NamedTuple):
    """How a format calls the tensors. Those of a layer follow the prefix `layer`, which holds the
    layer's number as {}; all end in ".weight".
    """

    embedding: str
    norm: str
    lm_head: str
    layer: str
    attention_norm: str
    query: str
    key: str
    value: str
    attention_out: str
    mlp_norm: str
    gate: str
    up: str
    down: str


class Tensors(Protocol):
    """The named tensors of an open model. Both methods raise `ModelFileError`."""

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor that is missing, misshapen or in a format that cannot be read."""

    def read(self, name: str) -> Tensor:
        """A tensor as floating point in our layout (rotary rows in half-rotation order)."""


def assemble(
    tensors: Tensors, names: Names, config: LlamaConfig, tied: bool, dtype: torch.dtype
) -> LlamaWeights:
    """Check every tensor first, then read; layers are read when they are taken."""
    for name, shape in _shapes(names, config, tied).items():
        tensors.check(name, shape)
    embedding = tensors.read(f"{names.embedding}.weight").to(dtype)
    return LlamaWeights(
        embedding=embedding,
        layers=_layers(tensors, names, config.num_layers, dtype),
        norm=tensors.read(f"{names.norm}.weight").float(),
        lm_head=embedding if tied else tensors.read(f"{names.lm_head}.weight").to(dtype),
    )


def _layers(
    tensors: Tensors, names: Names, num_layers: int, dtype: torch.dtype
) -> Iterator[LayerWeights]:
    for index in range(num_layers):
        prefix = names.layer.format(index)

        def read(*parts: str, prefix: str = prefix) -> Tensor:
            return torch.cat([tensors.read(f"{prefix}{part}.weight").to(dtype) for part in parts])

        yield LayerWeights(
            attention_norm=read(names.attention_norm).float(),
            qkv=read(names.query, names.key, names.value),
            attention_out=read(names.attention_out),
            mlp_norm=read(names.mlp_norm).float(),
            gate_up=read(names.gate, names.up),
            down=read(names.down),
        )


def _shapes(names: Names, config: LlamaConfig, tied: bool) -> dict[str, tuple[int, ...]]:
    """Every tensor that the model needs."""
    hidden, inner = config.hidden_size, config.inner_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    of_layer: dict[str, tuple[int, ...]] = {
        names.attention_norm: (hidden,),
        names.query: (queries, hidden),
        names.key: (keys, hidden),
        names.value: (keys, hidden),
        names.attention_out: (hidden, queries),
        names.mlp_norm: (hidden,),
        names.gate: (inner, hidden),
        names.up: (inner, hidden),
        names.down: (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        names.embedding: (config.vocab_size, hidden),
        names.norm: (hidden,),
    }
    if not tied:
        shapes[names.lm_head] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        prefix = names.layer.format(index)
        shapes |= {f"{prefix}{name}": shape for name, shape in of_layer.items()}
    return {f"{name}.weight": shape for name, shape in shapes.items()}
