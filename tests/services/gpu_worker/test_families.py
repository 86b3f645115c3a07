"""Every family against `transformers`: a tiny random checkpoint, in fp32, token by token."""

import msgspec
import pytest
import torch

from shared.sampling import SamplingParams
from tests.services.gpu_worker.core_kit import Answer, Ask, Core, Row
from tests.services.gpu_worker.legs_kit import Legs
from tests.services.gpu_worker.tiny_families import (
    CASES,
    VOCAB,
    WINDOW,
    reference,
    reference_logits,
    runner_of,
)

PROMPT = [(7 * i * i + 3 * i + 1) % VOCAB for i in range(301)]
NEW_IDS = WINDOW + 2


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=[*CASES])
def pair(request, tmp_path_factory):
    """A reference and our runner of the directory that the reference wrote."""
    model = reference(request.param)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder, max_shard_size="100KB")
    return model, runner_of(folder), runner_of(folder, torch.bfloat16)


def test_logits_and_greedy_ids_equal_those_of_transformers(pair):
    """A prompt in chunks that cross blocks, tiles and windows, then decode beyond a window."""
    model, runner, _ = pair
    legs = Legs(runner)
    leg = legs.add(PROMPT)
    legs.run({leg: 133}, NEW_IDS)
    ids = PROMPT + leg.output_ids
    expected = reference_logits(model, ids)[len(PROMPT) - 1 : -1]
    found = torch.stack(runner._model.seen[-NEW_IDS:])
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    assert leg.output_ids == expected.argmax(-1).tolist()


# What may happen to a leg, and the chunks in which the last prompt is computed meanwhile.
WAYS = {
    "company": len(PROMPT),
    "chunks": 7,
    "prefix hit": 50,
    "preemption": 50,
    "resume": 50,
}
_GREEDY = SamplingParams(max_tokens=36, temperature=0, logprobs=VOCAB)
_DRAWN = msgspec.structs.replace(
    _GREEDY, temperature=0.9, seed=11, top_p=0.9, repetition_penalty=1.2
)
ASKS = [Ask(PROMPT[60:100], _DRAWN), Ask(PROMPT[3:4], _GREEDY), Ask(PROMPT, _DRAWN)]
TOO_FEW_BLOCKS = 27  # the prompts fill 23 of them, and each answer needs two or three more


@pytest.fixture(scope="module")
def alone(pair):
    """What each leg says when nobody else is there and its prompt is computed in one piece."""
    cores = [Core(pair[1], batch=1, chunk=512) for _ in ASKS]
    return [core.answers([ask])[0] for core, ask in zip(cores, ASKS, strict=True)]


@pytest.mark.parametrize("way", WAYS)
def test_a_leg_in_fp32_is_bitwise_what_it_is_alone(pair, alone, way):
    """Ids drawn and greedy, and whole distributions, among others and with `way` happening."""
    num_blocks = TOO_FEW_BLOCKS if way == "preemption" else None
    core = Core(pair[1], batch=len(ASKS), chunk=WAYS[way], num_blocks=num_blocks)
    if way == "prefix hit":
        core.answers([ask._replace(prompt_ids=[*ask.prompt_ids[:160], 0]) for ask in ASKS])
    begin = 5 if way == "resume" else 0
    asks = [
        ask._replace(output_ids=said.ids[:begin]) for ask, said in zip(ASKS, alone, strict=True)
    ]
    found = core.answers(asks)

    assert found == [Answer(said.ids[begin:], said.logprobs[begin:], []) for said in alone]
    chunk = Row(WAYS[way], samples=way == "company")
    assert any(len(rows) == len(ASKS) and chunk in rows for rows in core.steps)
    assert (core.num_preemptions > 0) == (way == "preemption")
    assert (core.num_cached_tokens[-1] > 0) == (way == "prefix hit")


def test_bf16_says_nearly_the_same(pair):
    """Logits of a prompt and a decode step are off by what rounding alone does."""
    found = []
    for runner in pair[1:]:
        legs = Legs(runner)
        legs.run({legs.add(PROMPT, [7]): 133}, 1)
        found.append(runner._model.seen[-1])
    exact, coarse = found
    assert (coarse - exact).square().mean().sqrt() < 0.06 * exact.std()
