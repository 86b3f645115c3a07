"""One id of a row of logits: where a point in [0, 1) falls in its cumulative distribution.

The distribution is in fp64, in the order of ids, less what `min_p`, `top_k` and `top_p` cut off.
Weights of all 49,152 ids take 0.1 ms of a row, their sum so far half as long, sorting them twice.
So cuts are made among the leading ids, which nearly always hold them, and weights in fp32 say
roughly where a point falls among all. Where either leaves a doubt all are computed: the id drawn is
the same in any case.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.sampling import SamplingParams

Ids = NDArray[np.int64]
Values = NDArray[np.float32]
Weights = NDArray[np.float64]

_COLUMNS = 1024  # fewer take longer to reduce to; a vocabulary that small is computed at once
_HEAD, _LONG_HEAD = 256, 4096  # leading ids looked at first
_BLOCK = 64  # rough weights summed at once
# How far a sum of rough weights may be off, beside a total that may be, too. The exponent of a
# weight above e^-87 takes three roundings, 1.6e-5; its exponential and a block's sum take 4e-6.
_DOUBT = 6e-5
_LEAST = -87.0  # exponent of the least rough weight: less is denormal, and takes 100 times as long
_NOTHING = 1e-30  # more than all rough weights together that should be less
_COLDEST = 1e-30  # a temperature that fp32 can divide by

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) keyed by (seed, position): SplitMix64 (Steele et al., 2014) of a hashed
    seed, entered at `position`, so that nearby seeds share no stretch of their streams.
    """
    word = _mix((_mix((seed + _GOLDEN) & _WORD) + (position + 1) * _GOLDEN) & _WORD)
    return float(word >> 11) * 2.0**-53


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def leaders(values: Values, count: int) -> Ids:
    """At least `count` ids, in order, or all: those whose value is not below some edge. No NaN."""
    columns = max(_COLUMNS, 4 * count)
    if columns >= len(values):
        return np.arange(len(values))
    # Where `count` columns have their largest value on or above the edge, so have as many ids.
    whole = len(values) // columns * columns
    tops = values[:whole].reshape(-1, columns).max(axis=0)
    rest = values[whole:]
    np.maximum(tops[: len(rest)], rest, out=tops[: len(rest)])
    return np.flatnonzero(values >= np.partition(tops, -count)[-count])


class _Row:
    """Ids weigh e^((logit - best) / temperature): 1 the best, less the others."""

    def __init__(self, logits: Tensor, temperature: float) -> None:
        self.values: Values = logits.numpy()
        self._logits = logits
        self._temperature = temperature
        self._top = float(self.values.max())

    def weights(self, ids: Ids | None = None) -> Weights:
        """Of some ids, or of all."""
        logits = self._logits if ids is None else torch.from_numpy(self.values[ids])
        weights: Weights = logits.double().sub_(self._top).div_(self._temperature).exp_().numpy()
        return weights

    def at_least(self, weight: float) -> Ids:
        """All ids of so much weight, in order, and hardly any other."""
        edge = self._top + self._temperature * math.log(weight)
        return np.flatnonzero(self.values >= edge - 1e-6 * (1 + abs(edge)))

    def total(self) -> tuple[float, float]:
        """The sum of all weights lies between these two."""
        total = float(torch.from_numpy(self.weights()).sum())
        return total, total

    def rough_total(self) -> tuple[float, float]:
        """The same, in a third of the time."""
        total = float(self._rough().sum())
        return total * (1 - _DOUBT), total * (1 + _DOUBT)

    def rough_place(self, point: float) -> int | None:
        """The id where `point` falls among all; None where it is too near to the next one."""
        rough = self._rough()
        sums = rough.sum(1).double().cumsum(0).numpy()
        at = point * float(sums[-1])
        first = _id_at(rough, sums, at * (1 - _DOUBT) - _NOTHING)
        last = _id_at(rough, sums, at * (1 + _DOUBT) + _NOTHING)
        return first if first == last else None

    def _rough(self) -> Tensor:
        """Weights in fp32 [blocks, _BLOCK]; zeros at the end."""
        vocab = len(self._logits)
        rough = torch.empty(-(-vocab // _BLOCK) * _BLOCK)
        weights, rough[vocab:] = rough[:vocab], 0
        if self._temperature < _COLDEST:
            weights.copy_(torch.from_numpy(self.weights()))
        else:
            torch.sub(self._logits, self._top, out=weights)
            weights.mul_(1 / self._temperature).clamp_(min=_LEAST).exp_()
        return rough.view(-1, _BLOCK)


def draw(logits: Tensor, params: SamplingParams, point: float) -> int:
    """One id of `logits` fp32 [vocab], each finite or -inf, at a temperature above 0."""
    row = _Row(logits, params.temperature)
    ids = row.at_least(params.min_p) if params.min_p > 0 else None
    if ids is None and len(logits) > _COLUMNS:
        found = _drawn_early(row, params, point)
        if found is not None:
            return found
    weights = row.weights(ids)
    weights[weights < params.min_p] = 0
    _cut(weights, params)
    place = _pick(weights, point)
    return place if ids is None else int(ids[place])


def _drawn_early(row: _Row, params: SamplingParams, point: float) -> int | None:
    """The id where less than the weights of all tells it, else None."""
    limited = 0 < params.top_k < len(row.values)
    if not limited and params.top_p >= 1:
        return row.rough_place(point)
    for head, total in ((_HEAD, row.rough_total), (_LONG_HEAD, row.total)):
        if limited and head <= params.top_k:
            continue
        ids = leaders(row.values, head)
        weights = row.weights(ids)
        if _cut(weights, params, None if limited else total()):
            return int(ids[_pick(weights, point)])
    return None


def _id_at(rough: Tensor, sums: Weights, at: float) -> int:
    block = min(int(sums.searchsorted(at, side="right")), len(sums) - 1)
    before = float(sums[block - 1]) if block else 0.0
    inside: Weights = rough[block].double().cumsum(0).numpy()
    return block * _BLOCK + int(inside.searchsorted(at - before, side="right"))


def _pick(weights: Weights, point: float) -> int:
    cumulative: Weights = torch.from_numpy(weights).cumsum(0).numpy()  # numpy takes 4 times as long
    total = cumulative[-1]
    # Rounding can put the point at the total itself: the last one that has weight is meant.
    last = cumulative.searchsorted(total)
    return int(min(last, cumulative.searchsorted(point * total, side="right")))


def _cut(
    weights: Weights, params: SamplingParams, total: tuple[float, float] | None = None
) -> bool:
    """Zero what is not among the `top_k` best or, of these, outside the fewest best that hold
    `top_p` of their sum, or of a `total` between those two. What ties with the last one kept stays.

    False: if there were others of at most the least of these weights, they might be kept, too.
    """
    if params.top_k <= 0 and params.top_p >= 1:
        return True
    ranked = np.sort(weights)[::-1]
    held = ranked.cumsum()
    kept = min(params.top_k, len(ranked)) if params.top_k > 0 else len(ranked)
    if params.top_p < 1:
        least, most = (params.top_p * sum_ for sum_ in total or (held[kept - 1],) * 2)
        before = (held - ranked)[:kept]
        fewest, kept = (int(np.count_nonzero(before < sum_)) for sum_ in (least, most))
        if fewest != kept or held[-1] < most:
            return False
        kept = max(1, kept)
    floor = ranked[kept - 1]
    weights[weights < floor] = 0
    return bool(floor > ranked[-1])
