"""Choosing the next id of each row: a pure function of its logits, its ids, its seed and position.

A row's draw depends on nothing else, so neither the company in the batch nor a resume changes it.
"""

import math
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from services.gpu_worker.faults import Fault
from services.gpu_worker.runner import Outcome
from services.gpu_worker.scoring import Logits, token_logprobs
from services.gpu_worker.sequence import Sequence
from shared.messages import TokenLogprobs
from shared.sampling import SamplingParams

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FINITE = torch.finfo(torch.float32)
_CACHED = 1 << 16  # logits drawn from at once: half a MB in fp64
_HEADS = (256, 4096)  # best ids looked at first: sorting all of 49,152 takes 20 times as long


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


class Sampler:
    """Samples all rows of a step at once. `end_ids` are those that `min_tokens` masks."""

    def __init__(self, end_ids: frozenset[int]) -> None:
        self._end_ids = end_ids

    def sample(self, logits: Logits, sequences: list[Sequence]) -> list[Outcome]:
        """One row of `logits` per sequence; not changed. `values` are read of rows with `reads`.

        Logprobs are of the model's own distribution, before masks, penalties and temperature.
        """
        faults: list[Fault] = ["" if sound else "nan_logits" for sound in logits.sound]
        ids = [*logits.best]
        shaped: dict[int, Tensor] = {}
        drawn, told = [], []
        for row, sequence in enumerate(sequences):
            if not reads(sequence):
                continue
            if _has_shape(sequence):
                shaped[row] = logits.values[row].clone()
                self._shape(shaped[row], sequence)
                top, place = shaped[row].max(-1)
                ids[row] = int(place)
                if top == -math.inf and not faults[row]:
                    faults[row] = "no_id_left"
            if sequence.sampling.temperature > 0 and not faults[row]:
                drawn.append(row)
            if sequence.sampling.logprobs is not None and not faults[row]:
                told.append(row)
        # As many rows at once as a cache holds: 32 of 49,152 ids take a third of the time of all.
        size = max(1, _CACHED // max(1, logits.values.shape[1]))
        for begin in range(0, len(drawn), size):
            rows = drawn[begin : begin + size]
            of_rows = torch.stack([shaped.get(row, logits.values[row]) for row in rows])
            draws = _draw(of_rows, [sequences[row] for row in rows])
            for row, token_id in zip(rows, draws, strict=True):
                ids[row] = token_id
        logprobs = {row: _logprobs(logits.values[row], sequences[row], ids[row]) for row in told}
        return [
            Outcome(fault=fault) if fault else Outcome(ids[row], logprobs.get(row))
            for row, fault in enumerate(faults)
        ]

    def _shape(self, logits: Tensor, sequence: Sequence) -> None:
        """Masks first: what they take away no bias or penalty brings back."""
        params, output_ids = sequence.sampling, sequence.output_ids
        if params.allowed_token_ids:
            allowed = torch.tensor(params.allowed_token_ids)
            scores = logits[allowed]
            logits.fill_(-math.inf)
            logits[allowed] = scores
        if params.bad_words:
            logits[_next_bad_ids(params.bad_words, output_ids)] = -math.inf
        if len(output_ids) < params.min_tokens:
            ends = {*params.stop_token_ids} | (set() if params.ignore_eos else self._end_ids)
            logits[_within(ends, logits)] = -math.inf
        if params.logit_bias:
            bias = {i: b for i, b in params.logit_bias.items() if 0 <= i < len(logits)}
            logits[[*bias]] += torch.tensor([*bias.values()])
        if params.repetition_penalty != 1:
            seen = [*{*sequence.prompt_ids, *output_ids}]
            factor = max(params.repetition_penalty, _FINITE.tiny)  # below, fp32 makes it 0
            scores = logits[seen]
            scaled = torch.where(scores > 0, scores / factor, scores * factor)
            logits[seen] = scaled.clamp(max=_FINITE.max)  # an infinite best would be no number
        if params.presence_penalty or params.frequency_penalty:
            times = Counter(output_ids)
            counts = torch.tensor([*times.values()])
            logits[[*times]] -= params.presence_penalty + params.frequency_penalty * counts


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
        or params.presence_penalty
        or params.frequency_penalty
    )


def _next_bad_ids(bad_words: Iterable[tuple[int, ...]], output_ids: list[int]) -> list[int]:
    """Last ids of the words whose other ids were just output. What the prompt ends with does not
    count: a client cannot be kept from its own words.
    """
    found = []
    for *start, last in bad_words:
        if output_ids[len(output_ids) - len(start) :] == start:
            found.append(last)
    return found


def _within(ids: set[int], logits: Tensor) -> list[int]:
    """A client may name ids that this model does not have; they match nothing."""
    return [i for i in ids if 0 <= i < len(logits)]


def _draw(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    """One id per row by the inverse of the cumulative distribution, in fp64."""
    params = [sequence.sampling for sequence in sequences]
    temperature = torch.tensor([[p.temperature] for p in params], dtype=torch.float64)
    weights = logits.double()
    weights.sub_(weights.amax(-1, keepdim=True)).div_(temperature).exp_()  # the best is 1
    if any(p.min_p for p in params):
        weights[weights < torch.tensor([[p.min_p] for p in params], dtype=torch.float64)] = 0
    _cut(weights, params)
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    points = torch.tensor(
        [[uniform(s.sampling.seed, len(s.output_ids))] for s in sequences], dtype=torch.float64
    )
    ids = torch.searchsorted(cumulative, points * total, right=True)
    # Rounding can put the point at the total itself: the last id that has weight is meant.
    last = torch.searchsorted(cumulative, total)
    ids_of_rows: list[int] = torch.minimum(ids, last).squeeze(1).tolist()
    return ids_of_rows


def _cut(weights: Tensor, params: list[SamplingParams]) -> None:
    """Zero in each row of [rows, vocab] what is not among the `top_k` best or, of these, outside
    the fewest best that hold `top_p` of their sum. Ids that tie with the last one kept are kept.
    """
    vocab = weights.shape[1]
    limits = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    shares = [p.top_p if p.top_p < 1 else math.inf for p in params]
    left = [row for row in range(len(params)) if limits[row] < vocab or shares[row] < 1]
    for head in (*_HEADS, vocab):
        if not left:
            return
        rows = weights if len(left) == len(weights) else weights[left]
        best = rows.topk(min(head, vocab)).values
        top_k = torch.tensor([[limits[row]] for row in left])
        top_p = torch.tensor([[shares[row]] for row in left], dtype=torch.float64)
        held = best.cumsum(-1)
        of_best = held.gather(1, top_k.clamp(max=held.shape[1]) - 1)
        wanted = top_p * torch.where(top_k < vocab, of_best, rows.sum(-1, keepdim=True))
        kept = (held - best < wanted).sum(-1, keepdim=True).clamp(min=1).minimum(top_k)
        known = (top_k <= held.shape[1]) | ((top_k == vocab) & (held[:, -1:] >= wanted))
        floor = torch.where(known, best.gather(1, kept - 1), 0.0)
        rows.masked_fill_(rows < floor, 0)
        if rows is not weights:
            weights[left] = rows
        left = [row for row, done in zip(left, known.squeeze(1).tolist(), strict=True) if not done]


def _logprobs(logits: Tensor, sequence: Sequence, token_id: int) -> TokenLogprobs:
    """Of the chosen id and the k best of a row [vocab]."""
    return token_logprobs(logits.log_softmax(-1), token_id, sequence.sampling.logprobs or 0)
