"""The Llama architecture: Llama 2 and 3, Mistral, SmolLM2 and others of the same shape.

    h = embedding[ids]
    per layer:  h += attention(rms_norm(h));  h += down(silu(gate(x)) * up(x)), x = rms_norm(h)
    logits = lm_head(rms_norm(h))

The residual `h` and all norms are fp32 in every precision; products run in the weights' dtype.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from msgspec import Struct
from torch import Tensor

from kernels.linear import Linear
from kernels.paged_attention import AttentionGroup, paged_attention, write_kv
from kernels.rms_norm import rms_norm
from kernels.rotary_embedding import rotary_embedding_, rotary_table
from kernels.silu_and_mul import silu_and_mul


class LlamaConfig(Struct, frozen=True, kw_only=True):
    """Sizes of a model."""

    vocab_size: int
    hidden_size: int
    inner_size: int  # of the feed-forward layer
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope_base: float
    context_length: int  # positions the model was trained for


class LayerWeights(NamedTuple):
    """Matrices are [out, in] in the compute dtype, norms fp32."""

    attention_norm: Tensor  # [hidden]
    qkv: Tensor  # [(num_heads + 2 num_kv_heads) * head_dim, hidden]: queries, keys, values
    attention_out: Tensor  # [hidden, num_heads * head_dim]
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * inner, hidden]: gate, then up
    down: Tensor  # [hidden, inner]


@dataclass(slots=True, frozen=True)
class LlamaWeights:
    """What a loader hands over. `layers` is read once, layer by layer, so that a model that packs
    them holds only one layer twice.
    """

    embedding: Tensor  # [vocab, hidden]
    layers: Iterable[LayerWeights]
    norm: Tensor  # [hidden] fp32
    lm_head: Tensor  # [vocab, hidden]; the embedding itself when tied


class StepInput(NamedTuple):
    """One step over any mix of prefill chunks and decode rows; one row per token."""

    ids: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    slots: Tensor  # int64 [rows]: where each row's K and V go
    groups: list[AttentionGroup]  # cover all rows
    sampled: Tensor  # int64: the rows whose logits are wanted


class _Layer(NamedTuple):
    attention_norm: Tensor
    qkv: Linear
    attention_out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


def _packed(layers: Iterable[LayerWeights]) -> Iterator[_Layer]:
    for layer in layers:
        yield _Layer(
            layer.attention_norm,
            Linear(layer.qkv),
            Linear(layer.attention_out),
            layer.mlp_norm,
            Linear(layer.gate_up),
            Linear(layer.down),
        )


class Llama:
    """Weights ready to compute with. `forward` is all that a runner needs of a model."""

    def __init__(self, config: LlamaConfig, weights: LlamaWeights, max_model_len: int) -> None:
        self.config = config
        self.dtype = weights.embedding.dtype
        self._embedding = weights.embedding
        self._layers = list(_packed(weights.layers))
        self._norm = weights.norm
        self._lm_head = Linear(weights.lm_head)
        pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        self._rotary = rotary_table(config.rope_base**-pairs, max_model_len)

    def forward(self, step: StepInput, kv_pool: Tensor) -> Tensor:
        """Writes the step's K and V into `kv_pool` [layers, 2, kv_heads, blocks, block_size,
        head_dim]; returns logits fp32 [sampled, vocab].
        """
        eps = self.config.rms_eps
        factors = self._rotary[step.positions]
        hidden = self._embedding[step.ids].float()
        for layer, cache in zip(self._layers, kv_pool, strict=True):
            x = rms_norm(hidden, layer.attention_norm, eps).to(self.dtype)
            hidden += layer.attention_out(self._attention(layer.qkv(x), factors, step, cache))
            x = rms_norm(hidden, layer.mlp_norm, eps).to(self.dtype)
            hidden += layer.down(silu_and_mul(layer.gate_up(x)))
        if not len(step.sampled):
            return hidden.new_empty(0, self.config.vocab_size)
        x = rms_norm(hidden[step.sampled], self._norm, eps).to(self.dtype)
        return self._lm_head(x).float()

    def _attention(self, qkv: Tensor, factors: Tensor, step: StepInput, cache: Tensor) -> Tensor:
        config = self.config
        heads = qkv.view(qkv.shape[0], -1, config.head_dim)
        rotary_embedding_(heads[:, : -config.num_kv_heads], factors)
        write_kv(heads[:, config.num_heads :], cache, step.slots)
        return paged_attention(heads[:, : config.num_heads], cache, step.groups).flatten(1)
