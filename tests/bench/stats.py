"""What many numbers add up to (pure)."""

import math
import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Spread(NamedTuple):
    """A median, and how far the rounds lie apart."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    return Spread(statistics.median(values), min(values), max(values))


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between neighbours, as numpy and `vllm bench serve` have it; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    below, part = divmod(share * (len(ordered) - 1), 1)
    low, high = ordered[int(below)], ordered[math.ceil(below + part)]
    return low + (high - low) * part


def advantage(ours: Sequence[float], theirs: Sequence[float], *, more_is_better: bool) -> Spread:
    """How many times better we are, round by round: above 1, we are ahead."""
    pairs = list(zip(ours, theirs, strict=True))
    return spread([our / their if more_is_better else their / our for our, their in pairs])


def poisson_times(rate: float, count: int, rng: random.Random) -> list[float]:
    """When `count` requests arrive, in seconds, at `rate` per second on average. The same `rng`
    gives every rate the same pattern.
    """
    times: list[float] = []
    now = 0.0
    for _ in range(count):
        now += rng.expovariate(1.0) / rate
        times.append(now)
    return times
