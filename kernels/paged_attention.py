"""Causal attention over a paged KV cache, with grouped queries.

    y[h] = softmax(cap(scale * q[h] K[h // group]^T)) V[h // group]

`scale` is 1 / sqrt(head_dim) unless the model has another, `cap` nothing or a soft cap.

A cache of one layer is [2, kv_heads, blocks, block_size, head_dim]: keys, then values. Heads stand
before blocks so that gathering the blocks of a sequence yields [kv_heads, tokens, head_dim] as the
matrix product wants it; with tokens before heads a second copy took as long as the attention itself
(32 rows of 256 tokens, fp32: 3.2 ms against 1.5 ms a layer).

A cache of int8 has head_dim steps and then the fp32 scale of this token and head as four more
bytes. A scale for each token, and not for each channel of a page, because then what a token sees of
the others does not depend on which chunk filled the page.

A step's rows are cut into groups whose sequences share one padded length. Decode rows of similar
length make one group, a tile of a prefill chunk makes one of its own. In fp32 a row's result is
bitwise the same in every batch and chunking: padding is a multiple of the block size and adds exact
zeros, and the sum over values runs in tiles of 256 tokens, since longer ones are cut by length.
(With head_dim < 16 it may not be: torch multiplies tiny matrices by a kernel of their own.)

Under a sliding window a group gathers only the blocks from the first one in sight on, brought down
to a multiple of 256 tokens, so that the sum's tiles hold the same tokens for every row. Attention
sinks, which stay in sight, are gathered before them and make the first tile.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.softcap import softcap

VALUE_TILE = 256  # tokens; the longest sum that the matrix library was seen to take in one piece
SCALE_BYTES = 4  # of an int8 cache, behind each head of a token


class Sight(NamedTuple):
    """The tokens that one sees: the last `window`, itself included, and the first `sinks`."""

    window: int = 0  # 0 = all
    sinks: int = 0  # a multiple of the block size

    def first_block(self, position: int, block_size: int) -> int:
        """The first block to gather, behind those of sinks, for rows from `position` on; 0 = there
        is nothing between.
        """
        if not self.window:
            return 0
        return max(0, position - self.window + 1) // VALUE_TILE * VALUE_TILE // block_size


EVERYTHING = Sight()


class AttentionGroup(NamedTuple):
    """Rows [start, stop) of a step: `num_sequences` sequences with equally many rows each."""

    start: int
    stop: int
    num_sequences: int
    block_ids: Tensor  # int64 [num_sequences * blocks]; padded with blocks of the same sequence
    shared: int  # the gathered tokens before this one are seen by every row
    hidden: Tensor  # bool [num_sequences, rows, 1, tokens from `shared` on]: what a row may not see
    sinks: int = 0  # the gathered tokens before this one meet the queries that are turned for sinks
    apart: bool = False  # whether tokens between the sinks and the others were not gathered


def write_kv(keys_values: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Store row r of [rows, 2 * kv_heads, head_dim] (keys, then values) in slot `slots[r]`, which
    is block * block_size + offset.
    """
    stored = _rounded(keys_values) if cache.dtype == torch.int8 else keys_values.to(cache.dtype)
    rows, _, width = stored.shape
    by_head = stored.view(rows, 2, -1, width).permute(1, 2, 0, 3)
    cache.flatten(2, 3).index_copy_(2, slots, by_head)


def _rounded(x: Tensor) -> Tensor:
    """Steps and scale of each head [.., head_dim], as the cache has them. What is not finite stays
    so: its scale is NaN.
    """
    top = x.float().abs().amax(-1, keepdim=True)
    scale = torch.where(top.isfinite(), top / 127, math.nan)
    steps = torch.where(top > 0, x.float() * (127 / top), 0).round().nan_to_num()
    return torch.cat((steps.to(torch.int8), scale.view(torch.int8)), -1)


def _gathered(cache: Tensor, block_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """[kv_heads, tokens, head_dim] of keys or of values."""
    found = cache.index_select(1, block_ids).flatten(1, 2)
    if cache.dtype == torch.int8:
        scale = found[..., -SCALE_BYTES:].contiguous().view(torch.float32)
        return (found[..., :-SCALE_BYTES] * scale).to(dtype)
    return found.to(dtype)


def paged_attention(
    queries: Tensor,
    cache: Tensor,
    groups: list[AttentionGroup],
    scale: float | None = None,
    cap: float = 0.0,
    sink_queries: Tensor | None = None,
) -> Tensor:
    """`queries` [rows, heads, head_dim] -> the same shape. Keys of the step are in the cache.
    `sink_queries` = the same, turned for the sinks; None = nobody has any.
    """
    out = torch.empty_like(queries)
    scale = queries.shape[-1] ** -0.5 if scale is None else scale
    for group in groups:
        rows = slice(group.start, group.stop)
        near = None if sink_queries is None else sink_queries[rows] * scale
        out[rows] = _attend(queries[rows] * scale, near, cache, group, cap)
    return out


def _attend(
    queries: Tensor, near: Tensor | None, cache: Tensor, group: AttentionGroup, cap: float
) -> Tensor:
    """One group; `near` are its queries for sinks. Reads each of its KV blocks once and writes them
    once, gathered.
    """
    kv_heads, head_dim = cache.shape[1], queries.shape[-1]
    n = group.num_sequences
    shape = (kv_heads, n, -1, head_dim)
    keys = _gathered(cache[0], group.block_ids, queries.dtype).view(shape)
    values = _gathered(cache[1], group.block_ids, queries.dtype).view(shape)
    # [sequences, rows, kv_heads, group, head_dim] -> [kv_heads, sequences, rows * group, head_dim]
    q = _by_head(queries, n, kv_heads)
    products = _product(q.flatten(2, 3), keys.transpose(-1, -2))
    if near is not None:
        sinks = keys[..., : group.sinks, :].transpose(-1, -2)
        products[..., : group.sinks] = _product(_by_head(near, n, kv_heads).flatten(2, 3), sinks)
    scores = softcap(products, cap)
    scores.view(*q.shape[:4], -1)[..., group.shared :].masked_fill_(group.hidden, -math.inf)
    weights = torch.softmax(scores, dim=-1)  # fp32 inside, whatever the dtype
    first_tile = group.sinks if group.apart else VALUE_TILE
    attended = _weighted_sum(weights, values, first_tile).view(q.shape)
    return attended.permute(1, 2, 0, 3, 4).reshape(queries.shape)


def _by_head(queries: Tensor, n: int, kv_heads: int) -> Tensor:
    """[rows of n sequences, heads, head_dim] -> [kv_heads, n, rows, heads of each, head_dim]."""
    by_group = queries.view(n, -1, kv_heads, queries.shape[1] // kv_heads, queries.shape[-1])
    return by_group.permute(2, 0, 1, 3, 4)


def _weighted_sum(weights: Tensor, values: Tensor, first_tile: int) -> Tensor:
    """The product over tokens, summed in fp32 tile after tile."""
    length = values.shape[-2]
    total = _product(weights[..., :first_tile], values[..., :first_tile, :]).float()
    for start in range(first_tile, length, VALUE_TILE):
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
    sight: Sight = EVERYTHING,
    sink_queries: Tensor | None = None,
) -> Tensor:
    """One sequence without pages: `queries` are the last rows [rows, heads, head_dim] of it;
    keys and values [tokens, kv_heads, head_dim]. Everything in fp32.
    """
    rows, heads, head_dim = queries.shape
    tokens, kv_heads, _ = keys.shape
    wide_keys = keys.float().repeat_interleave(heads // kv_heads, dim=1)
    wide_values = values.float().repeat_interleave(heads // kv_heads, dim=1)
    scores = torch.einsum("rhd,thd->hrt", queries.float(), wide_keys)
    if sink_queries is not None:
        near = torch.einsum("rhd,thd->hrt", sink_queries.float(), wide_keys)
        scores[..., : sight.sinks] = near[..., : sight.sinks]
    scores *= 1 / math.sqrt(head_dim) if scale is None else scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    everything = torch.ones(rows, tokens, dtype=torch.bool)
    hidden = everything.triu(tokens - rows + 1)
    if sight.window:
        hidden[:, sight.sinks :] |= everything.tril(tokens - rows - sight.window)[:, sight.sinks :]
    weights = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)
    return torch.einsum("hrt,thd->rhd", weights, wide_values).to(queries.dtype)
