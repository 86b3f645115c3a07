"""Causal attention over a paged KV cache, with grouped queries.

    y[h] = softmax(cap(scale * q[h] K[h // group]^T)) V[h // group]

`scale` is 1 / sqrt(head_dim) unless the model has another, `cap` nothing or a soft cap.

A cache of one layer is [2, kv_heads, blocks, block_size, head_dim]: keys, then values. Heads stand
before blocks so that gathering the blocks of a sequence yields [kv_heads, tokens, head_dim] as the
matrix product wants it; with tokens before heads a second copy took as long as the attention itself
(32 rows of 256 tokens, fp32: 3.2 ms against 1.5 ms a layer).

A step's rows are cut into groups whose sequences share one padded length. Decode rows of similar
length make one group, a tile of a prefill chunk makes one of its own. In fp32 a row's result is
bitwise the same in every batch and chunking: padding is a multiple of the block size and adds exact
zeros, and the sum over values runs in tiles of 256 tokens, since longer ones are cut by length.
(With head_dim < 16 it may not be: torch multiplies tiny matrices by a kernel of their own.)

Under a sliding window a group gathers only the blocks from the first one in sight on, brought down
to a multiple of 256 tokens, so that the sum's tiles hold the same tokens for every row.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.softcap import softcap

VALUE_TILE = 256  # tokens; the longest sum that the matrix library was seen to take in one piece


class AttentionGroup(NamedTuple):
    """Rows [start, stop) of a step: `num_sequences` sequences with equally many rows each."""

    start: int
    stop: int
    num_sequences: int
    block_ids: Tensor  # int64 [num_sequences * blocks]; padded with blocks of the same sequence
    shared: int  # the gathered tokens before this one are seen by every row
    hidden: Tensor  # bool [num_sequences, rows, 1, tokens from `shared` on]: what a row may not see


def first_block(position: int, window: int, block_size: int) -> int:
    """The first block of a sequence to gather for rows from `position` on; a `window` of 0 is
    none.
    """
    if not window:
        return 0
    return max(0, position - window + 1) // VALUE_TILE * VALUE_TILE // block_size


def write_kv(keys_values: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Store row r of [rows, 2 * kv_heads, head_dim] (keys, then values) in slot `slots[r]`, which
    is block * block_size + offset.
    """
    rows, _, head_dim = keys_values.shape
    by_head = keys_values.view(rows, 2, -1, head_dim).permute(1, 2, 0, 3)
    cache.flatten(2, 3).index_copy_(2, slots, by_head)


def paged_attention(
    queries: Tensor,
    cache: Tensor,
    groups: list[AttentionGroup],
    scale: float | None = None,
    cap: float = 0.0,
) -> Tensor:
    """`queries` [rows, heads, head_dim] -> the same shape. Keys of the step are in the cache."""
    out = torch.empty_like(queries)
    scale = queries.shape[-1] ** -0.5 if scale is None else scale
    for group in groups:
        rows = slice(group.start, group.stop)
        out[rows] = _attend(queries[rows] * scale, cache, group, cap)
    return out


def _attend(queries: Tensor, cache: Tensor, group: AttentionGroup, cap: float) -> Tensor:
    """One group. Reads each of its KV blocks once and writes them once, gathered."""
    kv_heads, head_dim = cache.shape[1], cache.shape[-1]
    n = group.num_sequences
    keys = cache[0].index_select(1, group.block_ids).view(kv_heads, n, -1, head_dim)
    values = cache[1].index_select(1, group.block_ids).view(kv_heads, n, -1, head_dim)
    # [sequences, rows, kv_heads, group, head_dim] -> [kv_heads, sequences, rows * group, head_dim]
    q = queries.view(n, -1, kv_heads, queries.shape[1] // kv_heads, head_dim).permute(2, 0, 1, 3, 4)
    scores = softcap(_product(q.flatten(2, 3), keys.transpose(-1, -2)), cap)
    scores.view(*q.shape[:4], -1)[..., group.shared :].masked_fill_(group.hidden, -math.inf)
    weights = torch.softmax(scores, dim=-1)  # fp32 inside, whatever the dtype
    attended = _weighted_sum(weights, values).view(q.shape)
    return attended.permute(1, 2, 0, 3, 4).reshape(queries.shape)


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """The product over tokens, summed in fp32 tile after tile."""
    length = values.shape[-2]
    total = _product(weights[..., :VALUE_TILE], values[..., :VALUE_TILE, :]).float()
    for start in range(VALUE_TILE, length, VALUE_TILE):
        tile = slice(start, start + VALUE_TILE)
        total += _product(weights[..., tile], values[..., tile, :])
    return total


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Batched matrix product whose rows do not depend on how many there are: a single one would
    take the matrix-vector path, which sums in another order.
    """
    if left.shape[-2] == 1:
        return torch.matmul(left.expand(*left.shape[:-2], 2, -1), right)[..., :1, :]
    return torch.matmul(left, right)


def attention_reference(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float | None = None,
    cap: float = 0.0,
    window: int = 0,
) -> Tensor:
    """One sequence without pages: `queries` are the last rows [rows, heads, head_dim] of it;
    keys and values [tokens, kv_heads, head_dim]. A row sees `window` tokens, itself included, or
    all (0). Everything in fp32.
    """
    rows, heads, head_dim = queries.shape
    tokens, kv_heads, _ = keys.shape
    wide_keys = keys.float().repeat_interleave(heads // kv_heads, dim=1)
    wide_values = values.float().repeat_interleave(heads // kv_heads, dim=1)
    scores = torch.einsum("rhd,thd->hrt", queries.float(), wide_keys)
    scores *= 1 / math.sqrt(head_dim) if scale is None else scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    everything = torch.ones(rows, tokens, dtype=torch.bool)
    hidden = everything.triu(tokens - rows + 1)
    if window:
        hidden |= everything.tril(tokens - rows - window)
    weights = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)
    return torch.einsum("hrt,thd->rhd", weights, wide_values).to(queries.dtype)
