import math

import pytest
import torch

from services.gpu_worker.runner import Outcome
from services.gpu_worker.sampler import Sampler, reads
from services.gpu_worker.scoring import Logits
from shared.ids import unpack_ids
from tests.services.gpu_worker.sampler_kit import (
    END,
    SAMPLER,
    VOCAB,
    chi_squared_is_plausible,
    draws,
    leg,
    some_logits,
)


def kept(logits, mask):
    return torch.where(mask, torch.softmax(logits.double(), -1), 0.0) / (
        torch.softmax(logits.double(), -1)[mask].sum()
    )


@pytest.mark.parametrize("top_p", [0.0, 0.5, 0.9, 0.9999])
def test_top_p_draws_among_the_fewest_that_hold_it(top_p):
    """The id that crosses the limit belongs to them; the best one always does."""
    logits = some_logits()[0]
    order = logits.argsort(descending=True).tolist()
    probabilities = torch.softmax(logits.double(), -1)
    mask, held = torch.zeros(VOCAB, dtype=torch.bool), 0.0
    for i in order:
        mask[i] = True
        held += probabilities[i]
        if held >= top_p:
            break
    counts = draws(logits[None], count=5_000, top_p=top_p)
    if mask.sum() == 1:
        assert set(counts) == {order[0]}
    else:
        chi_squared_is_plausible(counts, kept(logits, mask))


def test_top_p_cuts_inside_top_k():
    """top_p is a share of what top_k left, as a flat distribution shows."""
    logits = -torch.arange(VOCAB, dtype=torch.float32)[None] * 1e-3
    assert set(draws(logits, count=500, top_k=10, top_p=0.5)) == set(range(5))


def test_greedy_is_the_first_best():
    logits = torch.zeros(2, VOCAB)
    logits[1, 9] = 1
    sampled = SAMPLER.sample(logits, [leg(temperature=0)] * 2)
    assert [s.token_id for s in sampled] == [0, 9]


def test_tiny_temperature_is_greedy():
    logits = some_logits()
    assert set(draws(logits, count=200, temperature=1e-40)) == {int(logits.argmax())}


def test_penalties_count_as_defined():
    """Presence once, frequency per occurrence, both for output ids; repetition for all ids."""
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, 3], logits[0, 4], logits[0, 5] = 3.0, 2.5, 2.0

    def best(**params):
        return SAMPLER.sample(logits, [leg(temperature=0, **params)])[0].token_id

    assert best(prompt=[3], presence_penalty=2.0) == 3
    assert best(output=[3], presence_penalty=0.6) == 4
    assert best(output=[3, 4], presence_penalty=2.0) == 5
    assert best(output=[3], frequency_penalty=0.4) == 3
    assert best(output=[3, 3], frequency_penalty=0.4) == 4
    assert best(prompt=[3], repetition_penalty=1.3) == 4
    assert best(prompt=[3], output=[4], repetition_penalty=2.0) == 5


def test_repetition_penalty_lowers_negative_logits_too():
    logits = torch.full((1, VOCAB), -2.0)
    logits[0, 3] = -1.0
    [sampled] = SAMPLER.sample(logits, [leg(temperature=0, prompt=[3], repetition_penalty=3.0)])
    assert sampled.token_id == 0


def test_logit_bias_moves_the_choice_and_ignores_unknown_ids():
    logits = some_logits()
    bias = {11: 100.0, VOCAB: 5.0, 10**9: 1.0}
    assert SAMPLER.sample(logits, [leg(temperature=0, logit_bias=bias)])[0].token_id == 11


@pytest.mark.parametrize(
    ("params", "masked"),
    [
        ({"min_tokens": 3}, {END}),
        ({"min_tokens": 3, "stop_token_ids": (9, VOCAB)}, {END, 9}),
        ({"min_tokens": 3, "ignore_eos": True, "stop_token_ids": (9,)}, {9}),
        ({"min_tokens": 2, "stop_token_ids": (9,)}, set()),
    ],
)
def test_end_ids_cannot_come_before_min_tokens(params, masked):
    """Two output ids stand already."""
    for token_id in (END, 9):
        logits = torch.zeros(1, VOCAB)
        logits[0, token_id] = 9
        [sampled] = SAMPLER.sample(logits, [leg(temperature=0, output=[1, 1], **params)])
        assert (sampled.token_id == token_id) == (token_id not in masked)


def test_logprobs_are_of_the_raw_distribution():
    """Bias moves the choice, not what the model thought of it."""
    logits = some_logits(2)
    legs = [leg(temperature=0, logprobs=3, logit_bias={11: 100.0}), leg(temperature=0, logprobs=0)]
    biased, plain = SAMPLER.sample(logits, legs)
    expected = torch.log_softmax(logits[0], -1)
    assert biased.logprobs.logprob == expected[11].item()
    assert unpack_ids(biased.logprobs.top_ids) == expected.topk(3).indices.tolist()
    assert biased.logprobs.top_logprobs == tuple(expected.topk(3).values.tolist())
    assert plain.logprobs.top_ids == b""
    assert plain.logprobs.logprob == torch.log_softmax(logits[1], -1).max().item()


def test_only_allowed_ids_come():
    """Neither a bias nor a penalty brings another back."""
    logits = some_logits()
    drawn = draws(
        logits, 300, allowed_token_ids=(3, 5, 9, 9), logit_bias={11: 100.0}, presence_penalty=-2
    )
    assert {*drawn} == {3, 5, 9}


def test_a_bad_word_ends_after_its_other_ids_only():
    """They must have been output, the last of them just now; what the prompt ends with is free."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6] = 9.0, 8.0

    def best(*bad_words, output=(), prompt=(1,)):
        legs = [leg(temperature=0, bad_words=bad_words, output=output, prompt=prompt)]
        return SAMPLER.sample(logits, legs)[0].token_id

    assert best((5,)) == 6
    assert best((5,), (6,)) == 0
    assert best((2, 5), output=[2]) == 6
    assert best((2, 5), output=[2, 3]) == 5
    assert best((2, 5), prompt=[2]) == 5
    assert best((1, 2, 5), prompt=[1], output=[2]) == 5
    assert best((1, 2, 5), output=[3, 1, 2]) == 6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": (END,), "min_tokens": 1},
        {"allowed_token_ids": (3, 4), "bad_words": ((3,), (4,))},
        {"bad_words": tuple((i,) for i in range(VOCAB))},
    ],
)
def test_masks_that_leave_nothing_fail_their_leg(temperature, params):
    """No id is made up, and the other rows are as they would be."""
    logits = some_logits(3)
    rows = [leg(seed=row, temperature=temperature) for row in range(3)]
    expected = SAMPLER.sample(logits, rows)
    rows[1] = leg(temperature=temperature, logprobs=2, **params)
    first, empty, third = SAMPLER.sample(logits, rows)
    assert (empty.fault, empty.token_id) == ("no_id_left", None)
    assert [first, third] == [expected[0], expected[2]]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_row_fails_alone(poison, temperature):
    logits = some_logits(3)
    legs = [leg(seed=row, temperature=temperature, logprobs=2) for row in range(3)]
    sound = SAMPLER.sample(logits, legs)
    logits[1, 17] = poison
    first, broken, third = SAMPLER.sample(logits, legs)
    assert broken.fault == "nan_logits"
    assert [first, third] == [sound[0], sound[2]]


def test_sampling_changes_no_logits():
    logits = some_logits()
    before = logits.clone()
    SAMPLER.sample(logits, [leg(top_k=2, logit_bias={1: 5.0}, min_tokens=5)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("params", "output", "read"),
    [
        ({}, (), False),
        ({"min_tokens": 1, "stop_token_ids": (3,)}, (), True),
        ({"min_tokens": 1, "stop_token_ids": (3,)}, (5,), False),
        ({"top_k": 3, "top_p": 0.5, "min_p": 0.5}, (), False),
        ({"temperature": 0.1}, (), True),
        ({"logprobs": 0}, (), True),
        ({"logit_bias": {1: 1.0}}, (), True),
        ({"bad_words": ((1,),)}, (), True),
        ({"allowed_token_ids": (1,)}, (), True),
        ({"repetition_penalty": 1.1}, (), True),
        ({"presence_penalty": 0.1}, (), True),
        ({"frequency_penalty": 0.1}, (), True),
    ],
)
def test_a_row_that_asks_for_no_more_than_the_best_id_reads_nothing_else(params, output, read):
    """A step need not write the logits of such rows; it says which are sound, and the best."""
    sequence = leg(output=output, **{"temperature": 0, **params})
    assert reads(sequence) == read
    if not read:
        bare = Logits(torch.empty(2, 0), [4, 6], [True, False])
        found = Sampler(frozenset({END})).sample(bare, [sequence, sequence])
        assert found == [Outcome(4), Outcome(fault="nan_logits")]
