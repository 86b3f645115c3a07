"""Choosing the next id of each row: a pure function of its logits, its ids, its seed and position.

A row's draw depends on nothing else, so neither the company in the batch nor a resume changes it.
"""

import math
from collections.abc import Iterable
from itertools import chain

import numpy as np
from torch import Tensor

from services.gpu_worker.drawing import Values, draw, uniform
from services.gpu_worker.runner import Outcome
from services.gpu_worker.scoring import Logits, token_logprobs
from services.gpu_worker.sequence import Sequence
from shared.sampling import SamplingParams

_FINITE = np.finfo(np.float32)


class Sampler:
    """Samples all rows of a step at once. `end_ids` are those that `min_tokens` masks."""

    def __init__(self, end_ids: frozenset[int]) -> None:
        self._end_ids = end_ids

    def sample(self, logits: Logits, sequences: list[Sequence]) -> list[Outcome]:
        """One row of `logits` per sequence; not changed. `values` are read of rows with `reads`.

        Logprobs are of the model's own distribution, before masks, penalties and temperature.
        """
        outcomes = []
        for row, sequence in enumerate(sequences):
            if not logits.sound[row]:
                outcomes.append(Outcome(fault="nan_logits"))
            elif reads(sequence):
                outcomes.append(self._choose(logits.values[row], logits.best[row], sequence))
            else:
                outcomes.append(Outcome(logits.best[row]))
        return outcomes

    def _choose(self, logits: Tensor, token_id: int, sequence: Sequence) -> Outcome:
        """From one row [vocab], of which `token_id` is the best."""
        params, shaped = sequence.sampling, logits
        if _has_shape(sequence):
            shaped = logits.clone()
            values = shaped.numpy()
            self._shape(values, sequence)
            token_id = int(values.argmax())
            if values[token_id] == -math.inf:
                return Outcome(fault="no_id_left")
        if params.temperature > 0:
            point = uniform(params.seed, len(sequence.output_ids))
            token_id = draw(shaped, params, point)
        if params.logprobs is None:
            return Outcome(token_id)
        logprobs = logits.log_softmax(-1)
        return Outcome(token_id, token_logprobs(logprobs, token_id, params.logprobs))

    def _shape(self, logits: Values, sequence: Sequence) -> None:
        """Masks first: what they take away no bias or penalty brings back."""
        params, output_ids = sequence.sampling, sequence.output_ids
        if params.allowed_token_ids:
            allowed = np.array(params.allowed_token_ids)
            scores = logits[allowed]
            logits.fill(-math.inf)
            logits[allowed] = scores
        if params.bad_words:
            logits[_next_bad_ids(params.bad_words, output_ids)] = -math.inf
        if len(output_ids) < params.min_tokens:
            ends = {*params.stop_token_ids} | (set() if params.ignore_eos else self._end_ids)
            logits[_within(ends, logits)] = -math.inf
        if params.logit_bias:
            biased = _within(params.logit_bias, logits)
            logits[biased] += np.array([params.logit_bias[i] for i in biased], np.float32)
        if params.repetition_penalty != 1 or _counts_output(params):
            _penalize(logits, sequence)


def reads(sequence: Sequence) -> bool:
    """Whether more is asked than which id is the best."""
    params = sequence.sampling
    return params.temperature > 0 or params.logprobs is not None or _has_shape(sequence)


def _has_shape(sequence: Sequence) -> bool:
    params = sequence.sampling
    return bool(
        len(sequence.output_ids) < params.min_tokens
        or params.allowed_token_ids
        or params.bad_words
        or params.logit_bias
        or params.repetition_penalty != 1
        or _counts_output(params)
    )


def _counts_output(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty)


def _penalize(logits: Values, sequence: Sequence) -> None:
    params, start = sequence.sampling, len(sequence.prompt_ids)
    ids = np.fromiter(chain(sequence.prompt_ids, sequence.output_ids), np.int64)
    if params.repetition_penalty != 1:
        factor = np.float32(
            max(params.repetition_penalty, float(_FINITE.tiny))
        )  # below, it would be 0
        scores = logits[ids]
        with np.errstate(over="ignore"):
            scaled = np.where(scores > 0, scores / factor, scores * factor)
        logits[ids] = scaled.clip(max=_FINITE.max)  # an infinite best would be no number
    if _counts_output(params):
        said, times = np.unique(ids[start:], return_counts=True)
        often = np.float32(params.frequency_penalty) * times.astype(np.float32)
        logits[said] -= np.float32(params.presence_penalty) + often


def _next_bad_ids(bad_words: Iterable[tuple[int, ...]], output_ids: list[int]) -> list[int]:
    """Last ids of the words whose other ids were just output. What the prompt ends with does not
    count: a client cannot be kept from its own words.
    """
    found = []
    for *start, last in bad_words:
        if output_ids[len(output_ids) - len(start) :] == start:
            found.append(last)
    return found


def _within(ids: Iterable[int], logits: Values) -> list[int]:
    """A client may name ids that this model does not have; they match nothing."""
    return [i for i in ids if 0 <= i < len(logits)]
