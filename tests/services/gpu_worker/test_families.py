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
    int8_runner_of,
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
    """A reference, and by precision our runners of the directory that the reference wrote."""
    model = reference(request.param)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder, max_shard_size="100KB")
    runners = {
        "fp32": runner_of(folder),
        "bf16": runner_of(folder, torch.bfloat16),
        "int8": int8_runner_of(folder),
    }
    yield model, runners
    runners["int8"].model.decoder.close()


def test_logits_and_greedy_ids_equal_those_of_transformers(pair):
    """A prompt in chunks that cross blocks, tiles and windows, then decode beyond a window."""
    model, runner = pair[0], pair[1]["fp32"]
    legs = Legs(runner)
    leg = legs.add(PROMPT)
    legs.run({leg: 133}, NEW_IDS)
    ids = PROMPT + leg.output_ids
    expected = reference_logits(model, ids)[len(PROMPT) - 1 : -1]
    found = torch.stack(runner.model.seen[-NEW_IDS:])
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
EXACT = ["fp32", "int8"]  # precisions in which a leg's company changes nothing
_GREEDY = SamplingParams(max_tokens=36, temperature=0, logprobs=VOCAB)
_DRAWN = msgspec.structs.replace(
    _GREEDY, temperature=0.9, seed=11, top_p=0.9, repetition_penalty=1.2
)
ASKS = [Ask(PROMPT[60:100], _DRAWN), Ask(PROMPT[3:4], _GREEDY), Ask(PROMPT, _DRAWN)]
TOO_FEW_BLOCKS = 27  # the prompts fill 23 of them, and each answer needs two or three more


@pytest.fixture(scope="module")
def said_alone(pair):
    """By precision: what each leg says when nobody else is there and its prompt is one piece."""
    said = {}
    for precision in EXACT:
        cores = [Core(pair[1][precision], batch=1, chunk=512) for _ in ASKS]
        said[precision] = [core.answers([ask])[0] for core, ask in zip(cores, ASKS, strict=True)]
    return said


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", EXACT)
def test_a_leg_is_bitwise_what_it_is_alone(pair, said_alone, precision, way):
    """Ids drawn and greedy, and whole distributions, among others and with `way` happening."""
    runner, alone = pair[1][precision], said_alone[precision]
    num_blocks = TOO_FEW_BLOCKS if way == "preemption" else None
    core = Core(runner, batch=len(ASKS), chunk=WAYS[way], num_blocks=num_blocks)
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
    for precision in ("fp32", "bf16"):
        runner = pair[1][precision]
        legs = Legs(runner)
        legs.run({legs.add(PROMPT, [7]): 133}, 1)
        found.append(runner.model.seen[-1])
    exact, coarse = found
    assert (coarse - exact).square().mean().sqrt() < 0.06 * exact.std()
