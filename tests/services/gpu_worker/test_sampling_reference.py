"""The sampler against the processors of `transformers`, on logits that no model made."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from services.gpu_worker.drawing import uniform
from tests.services.gpu_worker.sampler_kit import (
    END,
    SAMPLER,
    VOCAB,
    chi_squared_is_plausible,
    draws,
    leg,
    some_logits,
)

token_ids = st.integers(0, VOCAB - 1)
few_ids = st.lists(st.integers(0, 5), max_size=12)  # so that they repeat and end in bad words
params_of_a_leg = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.3, 1.0, 1.7])},
    optional={
        "top_k": st.sampled_from([1, 5, 20, VOCAB, 1000]),
        "top_p": st.sampled_from([0.2, 0.7, 0.95]),
        "min_p": st.sampled_from([0.01, 0.1, 0.5]),
        "repetition_penalty": st.sampled_from([0.7, 1.3]),
        "presence_penalty": st.sampled_from([-0.5, 1.5]),
        "frequency_penalty": st.sampled_from([-0.3, 0.8]),
        "logit_bias": st.dictionaries(token_ids, st.sampled_from([-100.0, -1.0, 2.0]), max_size=3),
        "bad_words": st.lists(
            st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), max_size=4
        ).map(tuple),
        "allowed_token_ids": st.lists(token_ids, min_size=9, max_size=20, unique=True).map(tuple),
        "min_tokens": st.integers(0, 12),
        "stop_token_ids": st.lists(token_ids, max_size=1).map(tuple),
    },
)


def processors(output: list[int], params: dict[str, Any]) -> tuple[Any, Any, Any]:
    """What looks at the output ids alone, at prompt and output, and at the scores alone."""
    of_output, of_all, of_scores = (LogitsProcessorList() for _ in range(3))
    if allowed := params.get("allowed_token_ids"):
        of_output.append(SuppressTokensLogitsProcessor({*range(VOCAB)} - {*allowed}))
    if words := params.get("bad_words"):
        of_output.append(NoBadWordsLogitsProcessor([list(word) for word in {*words}]))
    ends = [END, *params.get("stop_token_ids", ())]
    of_output.append(MinNewTokensLengthLogitsProcessor(0, params.get("min_tokens", 0), ends))
    if bias := params.get("logit_bias"):
        of_output.append(SequenceBiasLogitsProcessor([[[i], b] for i, b in bias.items()]))
    if penalty := params.get("repetition_penalty"):
        of_all.append(RepetitionPenaltyLogitsProcessor(penalty))
    of_scores.append(TemperatureLogitsWarper(params["temperature"]))
    if min_p := params.get("min_p"):
        of_scores.append(MinPLogitsWarper(min_p))
    if top_k := params.get("top_k"):
        of_scores.append(TopKLogitsWarper(top_k))
    if top_p := params.get("top_p"):
        of_scores.append(TopPLogitsWarper(top_p))
    return of_output, of_all, of_scores


def reference(
    logits: Tensor, prompt: list[int], output: list[int], params: dict[str, Any]
) -> Tensor:
    """The distribution fp64 [vocab] to draw from. OpenAI's two penalties by their formula."""
    of_output, of_all, of_scores = processors(output, params)
    said = torch.tensor([output], dtype=torch.int64)
    scores = of_output(said, logits[None])
    scores = of_all(torch.tensor([prompt + output]), scores)
    counts = torch.bincount(said[0], minlength=VOCAB)
    scores = scores - params.get("frequency_penalty", 0.0) * counts
    scores = scores - params.get("presence_penalty", 0.0) * (counts > 0)
    return torch.softmax(of_scores(said, scores.double())[0], -1)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    prompt=st.lists(token_ids, min_size=1, max_size=12),
    output=few_ids,
    params=params_of_a_leg,
)
def test_every_draw_is_that_of_the_reference(
    seed: int, prompt: list[int], output: list[int], params: dict[str, Any]
) -> None:
    """The id drawn is where the seed's number falls in the distribution that `transformers` makes
    of the same logits, ids and parameters: each penalty, mask and cut has its scope and place.
    """
    (logits,) = some_logits(seed=seed)
    probabilities = reference(logits, prompt, output, params)
    cumulative = torch.cat((torch.zeros(1, dtype=torch.float64), probabilities.cumsum(0)))
    legs = [leg(prompt=prompt, output=output, seed=seed + row, **params) for row in range(8)]
    for row, outcome in enumerate(SAMPLER.sample(logits.expand(8, -1), legs)):
        point = uniform(seed + row, len(output))
        assert outcome.token_id is not None
        assert probabilities[outcome.token_id] > 0
        low, high = cumulative[outcome.token_id], cumulative[outcome.token_id + 1]
        assert low - 1e-6 <= point <= high + 1e-6


ALL_AT_ONCE = {
    "temperature": 1.3,
    "top_k": 25,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": {11: 1.5, 12: -1.0},
    "bad_words": ((3,), (2, 4), (9, 5)),
    "min_tokens": 5,
}
PROMPT, OUTPUT = [1, 2, 3, 9], [8, 8, 14, 2]


@pytest.mark.timeout(600)  # 12 s of one processor, which may be a busy one
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "min_p": 0.02, "allowed_token_ids": (*range(4, 30),)},
        ALL_AT_ONCE,
    ],
    ids=["temperature", "min_p and allowed ids", "all at once"],
)
def test_a_hundred_thousand_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    """See `chi_squared_is_plausible` for how seldom this is wrong; the seeds are fixed, so here it
    is either never or always.
    """
    (logits,) = some_logits()
    counts = draws(logits[None], 100_000, prompt=PROMPT, output=OUTPUT, **params)
    chi_squared_is_plausible(counts, reference(logits, PROMPT, OUTPUT, params))


def test_the_judge_of_distributions_notices_two_percent_of_temperature() -> None:
    """With as many draws, so that the test above can fail."""
    (logits,) = some_logits()
    counts = draws(logits[None], 100_000, temperature=1.02)
    with pytest.raises(AssertionError, match="chi squared"):
        chi_squared_is_plausible(counts, torch.softmax(logits.double(), -1))


def test_seeded_rows_draw_the_same_in_any_company() -> None:
    """With every parameter set: alone, among 32 plain or equal rows, in any order."""
    logits = some_logits(33)
    rows = [
        leg(prompt=PROMPT, output=OUTPUT * (row % 3), seed=row, logprobs=2, **ALL_AT_ONCE)
        if row % 2
        else leg(seed=row)
        for row in range(33)
    ]
    alone = [SAMPLER.sample(logits[row : row + 1], [rows[row]])[0] for row in range(33)]
    for size in (1, 3, 8, 17, 33):
        assert SAMPLER.sample(logits[:size], rows[:size]) == alone[:size]
    assert SAMPLER.sample(logits.flip(0), rows[::-1]) == alone[::-1]
    assert not any(math.isnan(outcome.logprobs.logprob) for outcome in alone if outcome.logprobs)


@pytest.mark.parametrize("temperature", [0, 1e-320, 1])
@pytest.mark.parametrize("penalty", [5e-324, 1e-40, 1e-38])
def test_a_repetition_penalty_of_next_to_nothing_is_a_number_still(penalty, temperature):
    """What was seen and is likely comes again; what is masked does not, nor what there is not."""
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, :5] = torch.tensor([90.0, 50.0, 70.0, 0.0, -3.0])
    legs = [
        leg(
            prompt=range(1, 5),
            output=[0],
            seed=seed,
            temperature=temperature,
            repetition_penalty=penalty,
            bad_words=((0,),),
            logprobs=1,
        )
        for seed in range(20)
    ]
    sampled = SAMPLER.sample(logits.expand(len(legs), -1), legs)
    assert {s.fault for s in sampled} == {""}
    assert {s.token_id for s in sampled} <= {1, 2}
