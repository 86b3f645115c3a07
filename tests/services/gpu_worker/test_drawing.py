"""A draw against the distribution that sorting all weights in fp64 gives."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.gpu_worker.drawing import draw, leaders, uniform
from shared.sampling import SamplingParams
from tests.services.gpu_worker.sampler_kit import chi_squared_is_plausible

ROWS = 3
VOCABS = [1, 5, 64, 1000, 1024, 1025, 4097, 20_000]
KINDS = ["model", "flat", "equal", "steps", "masked", "steep"]
POINTS = [0.0, 1e-12, 0.3, 0.5, 0.9, 0.999, 1 - 2.0**-53]


def some_rows(kind: str, vocab: int, seed: int) -> Tensor:
    """As models have them (a few ids far above a wide field), and as they should not be."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(ROWS, vocab, generator=generator) * (0.01 if kind == "flat" else 2)
    if kind == "model":
        best = torch.randint(vocab, (ROWS, 40), generator=generator)
        rows.scatter_add_(1, best, torch.rand(ROWS, 40, generator=generator) * 10)
    if kind == "equal":
        rows.zero_()
    if kind == "steps":  # so that many tie
        rows = (rows * 4).round() / 4
    if kind == "masked":
        rows[:, torch.randperm(vocab, generator=generator)[1:][: vocab * 9 // 10]] = -math.inf
    if kind == "steep":
        rows *= 30
    return rows


def cumulative(logits: Tensor, params: SamplingParams) -> Tensor:
    """In fp64 [vocab], of what is kept."""
    weights = ((logits.double() - logits.max()) / params.temperature).exp()
    weights[weights < params.min_p] = 0
    ranked = weights.sort(descending=True).values
    kept = len(ranked)
    if 0 < params.top_k < kept:
        kept = params.top_k
    if params.top_p < 1:
        before = ranked[:kept].cumsum(0) - ranked[:kept]
        kept = max(1, int((before < params.top_p * ranked[:kept].sum()).sum()))
    weights[weights < ranked[kept - 1]] = 0
    return weights.cumsum(0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", VOCABS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    params=st.builds(
        SamplingParams,
        max_tokens=st.just(1),
        temperature=st.sampled_from([1e-320, 1e-40, 1e-5, 0.05, 0.3, 0.8, 1.0, 2.0]),
        top_k=st.sampled_from([0, 0, 1, 40, 255, 256, 257, 4096, 5000, 10**6]),
        top_p=st.sampled_from([1.0, 1.0, 0.0, 0.5, 0.9, 0.95, 0.999]),
        min_p=st.sampled_from([0.0, 0.0, 1e-9, 0.05, 1.0]),
    ),
)
def test_a_draw_is_where_its_point_falls_when_all_is_sorted(
    vocab: int, kind: str, seed: int, params: SamplingParams
) -> None:
    """Whether few ids tell, or all must be looked at; also with points next to where an id ends,
    but for what fp64 itself rounds.
    """
    for logits in some_rows(kind, vocab, seed):
        held = cumulative(logits, params)
        total = held[-1]
        ends = (held[:: max(1, vocab // 5)] / total).tolist()
        near = [end * (1 + side) for end in ends for side in (-1e-7, 1e-7) if end * (1 + side) < 1]
        for point in (*POINTS, *near):
            expected = int(torch.searchsorted(held, point * total, right=True))
            if point > 1 - 1e-12:  # next to the total itself: the last that has weight
                expected = min(expected, int(torch.searchsorted(held, total)))
            assert draw(logits, params, point) == expected


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    vocab=st.sampled_from(VOCABS),
    count=st.integers(1, 5000),
    seed=st.integers(0, 1000),
)
def test_leaders_are_all_that_are_not_below_one_of_them(
    kind: str, vocab: int, count: int, seed: int
) -> None:
    """At least as many as asked for, in order, none of the rest as good; not many more."""
    values = some_rows(kind, vocab, seed)[0].numpy()
    ids = leaders(values, count)
    assert len(ids) >= min(count, vocab)
    assert (np.diff(ids) > 0).all()
    rest = np.delete(values, ids)
    assert not len(rest) or rest.max() < values[ids].min()
    if kind == "model" and max(1024, count * 4) < vocab:
        assert len(ids) < 1.5 * count + 50


def test_positions_and_seeds_are_independent() -> None:
    """Pairs of neighbours fill the square evenly: no seed repeats another's stream shifted."""
    values = torch.tensor(
        [[uniform(seed, position) for position in range(64)] for seed in range(64)]
    )
    assert values.min() >= 0
    assert values.max() < 1
    neighbours = [
        (values[:, 1:], values[:, :-1]),
        (values[1:], values[:-1]),
        (values[1:, :-1], values[:-1, 1:]),
    ]
    for left, right in neighbours:
        cells = Counter(((left * 8).int() * 8 + (right * 8).int()).flatten().tolist())
        chi_squared_is_plausible(cells, torch.full((64,), 1 / 64, dtype=torch.float64))
