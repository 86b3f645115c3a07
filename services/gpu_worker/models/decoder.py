"""The decoder of Llama and of the families around it, configured (`families.py` says how).

    h = embedding[ids]
    per layer:  h += attention(rms_norm(h));  h += down(silu(gate(x)) * up(x)), x = rms_norm(h)
    logits = lm_head(rms_norm(h))

The residual `h` and all norms are fp32 in every precision; products run in the weights' dtype.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from msgspec import Struct
from torch import Tensor

from kernels.cpu.rotation import rotation
from kernels.gated import gelu_and_mul, silu_and_mul
from kernels.linear import Linear
from kernels.paged_attention import AttentionGroup, Sight, paged_attention, write_kv
from kernels.rms_norm import rms_norm
from kernels.rotary_embedding import rotary_embedding_
from kernels.softcap import softcap
from services.gpu_worker.models.rope import Rope


class DecoderConfig(Struct, frozen=True, kw_only=True):
    """Sizes of a model, and where it differs from Llama."""

    vocab_size: int
    hidden_size: int
    inner_size: int  # of the feed-forward layer
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    context_length: int  # positions the model was trained for
    rope: Rope
    local_rope: Rope | None = None  # of the layers with a window; None = `rope`
    windows: tuple[int, ...]  # per layer: tokens that a token sees, itself included; 0 = all
    query_scale: float  # of the attention scores
    attention_softcap: float = 0.0  # 0 = none
    logits_softcap: float = 0.0
    embedding_scale: float = 1.0
    gelu: bool = False
    # What a worker is told beside the model (`kv_policy.py`):
    kv_dtype: str = "auto"  # of keys and values as they are kept: bf16, int8; auto = the model's
    kv_window: int = 0  # tokens that a token sees at most; 0 = all that the model does
    kv_sinks: int = 0  # first tokens that stay in sight nevertheless

    @property
    def kv_int8(self) -> bool:
        return self.kv_dtype == "int8"

    @property
    def kinds(self) -> tuple["LayerKind", ...]:
        """Of each layer. One whose own window is no larger than the policy's stays as it is."""
        return tuple(
            LayerKind(bool(own and self.local_rope), self._sight(own)) for own in self.windows
        )

    def _sight(self, own: int) -> Sight:
        if not self.kv_window or 0 < own <= self.kv_window:
            return Sight(own)
        return Sight(self.kv_window, self.kv_sinks)


class LayerKind(NamedTuple):
    """What tells the attention of one layer from another's."""

    local: bool  # turns by `local_rope`
    sight: Sight


class Turns(NamedTuple):
    """Rotary factors of a step's rows, and of their queries where these meet the sinks."""

    rows: Tensor
    sinks: Tensor | None


class Matrix(NamedTuple):
    """A fixed product: weight [out, in] and bias [out], in the compute dtype."""

    weight: Tensor
    bias: Tensor | None = None


class LayerWeights(NamedTuple):
    """Norms are fp32; None where the family has none. A matrix is read when it is called for, so
    that whoever packs them holds only one unpacked at a time.
    """

    attention_norm: Tensor  # [hidden]
    qkv: Callable[[], Matrix]  # [queries, keys, values: head_dim rows a head, hidden]
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None  # [head_dim]
    attention_out: Callable[[], Matrix]  # [hidden, num_heads * head_dim]
    attention_post_norm: Tensor | None  # [hidden]
    mlp_norm: Tensor  # [hidden]
    gate_up: Callable[[], Matrix]  # [2 * inner, hidden]: gate, then up
    down: Callable[[], Matrix]  # [hidden, inner]
    mlp_post_norm: Tensor | None  # [hidden]


@dataclass(slots=True, frozen=True)
class DecoderWeights:
    """What a loader hands over. `layers` is read once, and the file is closed when this is gone."""

    embedding: Callable[[], Tensor]  # [vocab, hidden]; read once, and kept
    layers: Iterable[LayerWeights]
    norm: Tensor  # [hidden] fp32
    lm_head: Callable[[], Tensor]  # [vocab, hidden]; the embedding itself when tied


class StepInput(NamedTuple):
    """One step over any mix of prefill chunks and decode rows; one row per token."""

    ids: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    slots: Tensor  # int64 [rows]: where each row's K and V go
    groups: dict[Sight, list[AttentionGroup]]  # each list covers all rows


class _Layer:
    """One layer, its matrices packed."""

    def __init__(
        self, config: DecoderConfig, weights: LayerWeights, kind: LayerKind, dtype: torch.dtype
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._attention_norm = weights.attention_norm
        self._attention_post_norm = weights.attention_post_norm
        self._query_norm, self._key_norm = weights.query_norm, weights.key_norm
        self._mlp_norm, self._mlp_post_norm = weights.mlp_norm, weights.mlp_post_norm
        self._qkv = Linear(*weights.qkv())
        self._attention_out = Linear(*weights.attention_out())
        self._gate_up = Linear(*weights.gate_up())
        self._down = Linear(*weights.down())
        self._gated = gelu_and_mul if config.gelu else silu_and_mul
        self._spread = rotation(config.head_dim).float() if config.kv_int8 else None
        self.kind = kind

    def add_to(self, hidden: Tensor, turns: Turns, step: StepInput, cache: Tensor) -> None:
        """Add what this layer says to the residual `hidden` [rows, hidden]."""
        x = self._normalized(hidden, self._attention_norm)
        out = self._attention_out(self._attention(self._qkv(x), turns, step, cache))
        hidden += self._post_normalized(out, self._attention_post_norm)
        x = self._normalized(hidden, self._mlp_norm)
        out = self._down(self._gated(self._gate_up(x)))
        hidden += self._post_normalized(out, self._mlp_post_norm)

    def _attention(self, qkv: Tensor, turns: Turns, step: StepInput, cache: Tensor) -> Tensor:
        config = self._config
        heads = qkv.view(qkv.shape[0], -1, config.head_dim)
        queries = heads[:, : config.num_heads]
        keys = heads[:, config.num_heads : -config.num_kv_heads]
        if self._query_norm is not None:
            queries.copy_(self._normalized(queries.float(), self._query_norm))
        if self._key_norm is not None:
            keys.copy_(self._normalized(keys.float(), self._key_norm))
        sink_queries = None
        if turns.sinks is not None:
            sink_queries = self._turn(queries.clone(), turns.sinks)
        self._turn(heads[:, : -config.num_kv_heads], turns.rows)
        write_kv(heads[:, config.num_heads :], cache, step.slots)
        groups = step.groups[self.kind.sight]
        scale, cap = config.query_scale, config.attention_softcap
        return paged_attention(queries, cache, groups, scale, cap, sink_queries).flatten(1)

    def _turn(self, x: Tensor, factors: Tensor) -> Tensor:
        """Queries and keys in place. Keys have a few large channels, on which int8 with a scale per
        token would spend its steps; they are spread, which leaves the scores as they are.
        """
        rotary_embedding_(x, factors)
        return x if self._spread is None else x.copy_(x.float() @ self._spread)

    def _normalized(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._config.rms_eps).to(self._dtype)

    def _post_normalized(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else rms_norm(x.float(), weight, self._config.rms_eps)


class Decoder:
    """Weights ready to compute with. `forward` and `logits` are all that a runner needs."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, max_model_len: int) -> None:
        self.config = config
        self._embedding = weights.embedding()
        self.dtype = self._embedding.dtype
        self._layers = [
            _Layer(config, layer, kind, self.dtype)
            for layer, kind in zip(weights.layers, config.kinds, strict=True)
        ]
        self._norm = weights.norm
        self._lm_head = Linear(weights.lm_head())
        self._rotary = config.rope.table(max_model_len)
        local = config.local_rope
        self._local_rotary = local.table(max_model_len) if local else self._rotary
        self._kinds = {*config.kinds}

    def forward(self, step: StepInput, kv_pool: Tensor) -> Tensor:
        """Writes the step's K and V into `kv_pool` [layers, 2, kv_heads, blocks, block_size,
        head_dim]; returns the last hidden state fp32 [rows, hidden].
        """
        config = self.config
        turns = {kind: self._turns(kind, step.positions) for kind in self._kinds}
        hidden = self._embedding[step.ids].float()
        if config.embedding_scale != 1:
            hidden *= config.embedding_scale
        for layer, cache in zip(self._layers, kv_pool, strict=True):
            layer.add_to(hidden, turns[layer.kind], step, cache)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits fp32 [rows, vocab] after any rows of a last hidden state [rows, hidden]."""
        config = self.config
        x = rms_norm(hidden, self._norm, config.rms_eps).to(self.dtype)
        return softcap(self._lm_head(x).float(), config.logits_softcap)

    def _turns(self, kind: LayerKind, positions: Tensor) -> Turns:
        """Of rows at `positions`. They count inside the cache (StreamingLLM, Xiao et al., 2023):
        where ids between sinks and window are out of sight, a query is as far from the sinks as if
        nothing had been between. Keys need not be turned again: what is in the window stays as far
        apart as it was.
        """
        table = self._local_rotary if kind.local else self._rotary
        window, sinks = kind.sight
        near = table[positions.clamp(max=sinks + window - 1)] if sinks else None
        return Turns(table[positions], near)
