"""Rows to sample, and how to judge what was drawn."""

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from services.gpu_worker.runner import Outcome
from services.gpu_worker.sampler import Sampler
from services.gpu_worker.scoring import Logits
from services.gpu_worker.sequence import Sequence
from shared.sampling import SamplingParams

VOCAB = 40
END = 7


class OfTensors(Sampler):
    """A sampler of nothing but values."""

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[Outcome]:  # type: ignore[override]
        return super().sample(Logits.of(logits), sequences)


SAMPLER = OfTensors(frozenset({END}))


def leg(*, prompt: Any = (1,), output: Any = (), **params: Any) -> Sequence:
    params = {"max_tokens": 100, **params}
    return Sequence(list(prompt), SamplingParams(**params), output_ids=list(output))


def some_logits(rows: int = 1, seed: int = 5) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def draws(logits: Tensor, count: int = 8_000, **params: Any) -> Counter[int]:
    """How often each id is drawn from one row of logits under `count` seeds."""
    legs = [leg(seed=seed, **params) for seed in range(count)]
    sampled = SAMPLER.sample(logits.expand(count, -1), legs)
    return Counter(s.token_id for s in sampled)


def chi_squared_is_plausible(counts: Counter[int], probabilities: Tensor) -> None:
    """False alarm below 1e-6 for any honest generator (Wilson-Hilferty, 4.9 sigma). Ids that are
    expected less than 10 times are judged together.
    """
    total = sum(counts.values())
    expected = (probabilities * total).tolist()
    assert all(counts[i] == 0 for i, times in enumerate(expected) if times == 0)
    rare = [i for i, times in enumerate(expected) if 0 < times < 10]
    cells = [(counts[i], times) for i, times in enumerate(expected) if times >= 10]
    if rare:
        cells.append((sum(counts[i] for i in rare), sum(expected[i] for i in rare)))
    statistic = sum((seen - times) ** 2 / times for seen, times in cells)
    freedom = len(cells) - 1
    spread = 2 / (9 * freedom)
    sigmas = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    assert sigmas < 4.9, f"chi squared {statistic:.1f} at {freedom} degrees of freedom"
