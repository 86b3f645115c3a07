"""What a precision makes of a text, and how far that is from fp32.

A text is read as llama.cpp's `llama-perplexity` reads it, so that the numbers can stand side by
side: in windows of `context` ids that share nothing, the rest left out, and in each the first half
is only context.
"""

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from services.gpu_worker.model_runner import DecoderRunner
from services.gpu_worker.runner import Scheduled
from services.gpu_worker.sequence import Sequence
from shared.kv import BLOCK_SIZE
from shared.sampling import SamplingParams


def windows(ids: list[int], context: int) -> list[list[int]]:
    """Raises `ValueError` for a text that does not fill one."""
    if len(ids) < context:
        raise ValueError(f"context: {context} ids, but the text has {len(ids)}")
    return [ids[end - context : end] for end in range(context, len(ids) + 1, context)]


def scored(window: list[int]) -> list[int]:
    """Those of its ids that count."""
    return window[len(window) // 2 + 1 :]


def logprobs(runner: DecoderRunner, window: list[int]) -> Tensor:
    """fp32 [scored ids, vocab]: of every id in the place of each that counts."""
    sequence = Sequence(window, SamplingParams(max_tokens=1, temperature=0))
    sequence.block_table = [*range(-(-len(window) // BLOCK_SIZE))]
    rows = [*range(len(window) // 2, len(window) - 1)]
    with torch.inference_mode():
        runner.model.forward([Scheduled(sequence, len(window))])
        return runner.model.logits(rows).values.log_softmax(-1)


class Distance(NamedTuple):
    """One number for each scored id."""

    nll: list[float]  # nats: of the id that the text has
    reference_nll: list[float]
    kl: list[float]  # nats: from the reference's distribution to this one
    same_best: list[bool]

    @classmethod
    def of(cls, reference: Tensor, found: Tensor, ids: list[int]) -> "Distance":
        """Of logprobs [ids, vocab], each row in the place of one of `ids`."""
        places = torch.tensor(ids)[:, None]
        return cls(
            nll=(-found.gather(1, places)[:, 0]).tolist(),
            reference_nll=(-reference.gather(1, places)[:, 0]).tolist(),
            kl=(reference.exp() * (reference - found)).sum(-1).tolist(),
            same_best=(reference.argmax(-1) == found.argmax(-1)).tolist(),
        )

    def __add__(self, other: object) -> "Distance":
        assert isinstance(other, Distance)
        return Distance(*(mine + others for mine, others in zip(self, other, strict=True)))


class Summary(NamedTuple):
    """What a table says of a precision."""

    perplexity: float
    change: float  # of the perplexity, against the reference's: 0.01 = 1 % more
    change_error: float  # one standard error of `change`, by how much it varies among the ids
    kl: float
    same_best: float

    @classmethod
    def of(cls, distance: Distance) -> "Summary":
        more = [a - b for a, b in zip(distance.nll, distance.reference_nll, strict=True)]
        return cls(
            perplexity=math.exp(statistics.fmean(distance.nll)),
            change=math.expm1(statistics.fmean(more)),
            change_error=statistics.stdev(more) / len(more) ** 0.5,
            kl=statistics.fmean(distance.kl),
            same_best=statistics.fmean(distance.same_best),
        )


def distances(
    reference: DecoderRunner, others: Iterable[DecoderRunner], text: list[list[int]]
) -> list[Summary]:
    """Of each of `others` over the windows of a text. One window's logprobs are held at a time."""
    others = [*others]
    found = [Distance([], [], [], []) for _ in others]
    for window in text:
        expected = logprobs(reference, window)
        for index, runner in enumerate(others):
            found[index] += Distance.of(expected, logprobs(runner, window), scored(window))
    return [Summary.of(distance) for distance in found]
