"""From named tensors of a file to `DecoderWeights`; what GGUF and safetensors have in common."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from services.gpu_worker.models.decoder import DecoderConfig, DecoderWeights, LayerWeights, Matrix


class Names(NamedTuple):
    """How a format calls the tensors of a family. Those of a layer follow the prefix `layer`, which
    holds the layer's number as {}; all end in ".weight", biases in ".bias". A name "" is of a norm
    that the family does not have. A matrix of several names is theirs stacked.
    """

    embedding: str
    norm: str
    lm_head: str
    layer: str
    attention_norm: str
    qkv: tuple[str, ...]  # query, key and value, or the three as one
    attention_out: str
    mlp_norm: str
    gate_up: tuple[str, ...]  # gate and up, or both as one
    down: str
    query_norm: str = ""
    key_norm: str = ""
    attention_post_norm: str = ""
    mlp_post_norm: str = ""
    biased: frozenset[str] = frozenset()  # tensors that have a bias, too: all of a matrix, or none


class Tensors(Protocol):
    """The named tensors of an open model. Both methods raise `ModelFileError`."""

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor that is missing, misshapen or in a format that cannot be read."""

    def read(self, name: str, into: Tensor) -> None:
        """Fill `into` with a tensor of its shape, converted to its dtype and our layout (rotary
        rows in half-rotation order, norms as the factors they are).
        """


def assemble(
    tensors: Tensors, names: Names, config: DecoderConfig, tied: bool, dtype: torch.dtype
) -> DecoderWeights:
    """Check every tensor first; each is read when it is called for, straight into its place."""
    shapes = _shapes(names, config, tied)
    for name, shape in shapes.items():
        tensors.check(name, shape)
    reader = _Reader(tensors, shapes, dtype)
    embedding = cache(partial(reader.stacked, [f"{names.embedding}.weight"]))
    return DecoderWeights(
        embedding=embedding,
        layers=_layers(reader, names, config.num_layers),
        norm=reader.norm(f"{names.norm}.weight"),
        lm_head=embedding if tied else partial(reader.stacked, [f"{names.lm_head}.weight"]),
    )


class _Reader(NamedTuple):
    """Tensors of known shapes; matrices come in `dtype`, norms in fp32."""

    tensors: Tensors
    shapes: dict[str, tuple[int, ...]]
    dtype: torch.dtype

    def norm(self, name: str) -> Tensor:
        norm = torch.empty(self.shapes[name])
        self.tensors.read(name, norm)
        return norm

    def stacked(self, names: list[str]) -> Tensor:
        rows = [self.shapes[name][0] for name in names]
        out = torch.empty(sum(rows), *self.shapes[names[0]][1:], dtype=self.dtype)
        for name, part in zip(names, torch.split(out, rows), strict=True):
            self.tensors.read(name, part)
        return out

    def matrix(self, names: list[str], biased: bool) -> Matrix:
        weight = self.stacked([f"{name}.weight" for name in names])
        return Matrix(weight, self.stacked([f"{name}.bias" for name in names]) if biased else None)


def _layers(reader: _Reader, names: Names, num_layers: int) -> Iterator[LayerWeights]:
    for index in range(num_layers):
        prefix = names.layer.format(index)

        def norm(name: str, prefix: str = prefix) -> Tensor:
            return reader.norm(f"{prefix}{name}.weight")

        def matrix(*parts: str, prefix: str = prefix) -> Callable[[], Matrix]:
            biased = names.biased.issuperset(parts)
            return partial(reader.matrix, [f"{prefix}{part}" for part in parts], biased)

        yield LayerWeights(
            attention_norm=norm(names.attention_norm),
            qkv=matrix(*names.qkv),
            query_norm=norm(names.query_norm) if names.query_norm else None,
            key_norm=norm(names.key_norm) if names.key_norm else None,
            attention_out=matrix(names.attention_out),
            attention_post_norm=norm(names.attention_post_norm)
            if names.attention_post_norm
            else None,
            mlp_norm=norm(names.mlp_norm),
            gate_up=matrix(*names.gate_up),
            down=matrix(names.down),
            mlp_post_norm=norm(names.mlp_post_norm) if names.mlp_post_norm else None,
        )


def _shapes(names: Names, config: DecoderConfig, tied: bool) -> dict[str, tuple[int, ...]]:
    """Every tensor that the model needs."""
    hidden, inner = config.hidden_size, config.inner_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    qkv_rows = (queries, keys, keys) if len(names.qkv) == 3 else (queries + 2 * keys,)
    gate_up_rows = (inner, inner) if len(names.gate_up) == 2 else (2 * inner,)
    of_layer: dict[str, tuple[int, ...]] = {
        names.attention_norm: (hidden,),
        names.query_norm: (config.head_dim,),
        names.key_norm: (config.head_dim,),
        names.attention_out: (hidden, queries),
        names.attention_post_norm: (hidden,),
        names.mlp_norm: (hidden,),
        names.down: (hidden, inner),
        names.mlp_post_norm: (hidden,),
    }
    of_layer |= {n: (rows, hidden) for n, rows in zip(names.qkv, qkv_rows, strict=True)}
    of_layer |= {n: (rows, hidden) for n, rows in zip(names.gate_up, gate_up_rows, strict=True)}
    of_layer.pop("", None)
    shapes: dict[str, tuple[int, ...]] = {
        f"{names.embedding}.weight": (config.vocab_size, hidden),
        f"{names.norm}.weight": (hidden,),
    }
    if not tied:
        shapes[f"{names.lm_head}.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        prefix = names.layer.format(index)
        for name, shape in of_layer.items():
            shapes[f"{prefix}{name}.weight"] = shape
            if name in names.biased:
                shapes[f"{prefix}{name}.bias"] = shape[:1]
    return shapes
