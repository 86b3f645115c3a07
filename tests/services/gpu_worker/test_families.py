"""Every family against `transformers`: a tiny random checkpoint, in fp32, token by token."""

import pytest
import torch

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


def test_a_leg_is_bitwise_the_same_however_it_is_batched(pair):
    """Ids and logprobs: alone and whole, or in chunks and changing company."""
    _, runner, _ = pair
    prompts = [PROMPT, PROMPT[:40], PROMPT[3:4]]

    def run(chosen, budgets):
        legs = Legs(runner)
        added = [legs.add(prompt) for prompt in chosen]
        return legs.run(dict(zip(added, budgets, strict=True)), 10)

    expected = [run([prompt], [1000])[0] for prompt in prompts]
    assert run(prompts, [1000, 1000, 1000]) == expected
    assert run(prompts, [61, 5, 1]) == expected


def test_bf16_says_nearly_the_same(pair):
    """Logits of a prompt and a decode step are off by what rounding alone does."""
    found = []
    for runner in pair[1:]:
        legs = Legs(runner)
        legs.run({legs.add(PROMPT, [7]): 133}, 1)
        found.append(runner._model.seen[-1])
    exact, coarse = found
    assert (coarse - exact).square().mean().sqrt() < 0.06 * exact.std()
