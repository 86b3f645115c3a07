"""Windows, sinks and int8 KV: what they compute, what they hold, and that nothing else shows."""

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from services.gpu_worker.batcher import Batcher
from services.gpu_worker.block_pool import BlockPool
from services.gpu_worker.config import WorkerConfig
from services.gpu_worker.kv_policy import FULL, KvPolicy
from services.gpu_worker.pace import Pace
from services.gpu_worker.runner import Outcome, Scheduled
from services.gpu_worker.sequence import Sequence
from shared.kv import BLOCK_SIZE
from shared.sampling import SamplingParams
from tests.services.gpu_worker.core_kit import Answer, Ask, Core
from tests.services.gpu_worker.tiny_families import VOCAB, int8_runner_of, reference, runner_of

PROMPT = [(7 * i * i + 3 * i + 1) % VOCAB for i in range(150)]
SINKS = KvPolicy.of(40, 4, 64)
WINDOW = KvPolicy.of(40, 0, 64)
GREEDY = SamplingParams(max_tokens=30, temperature=0, logprobs=VOCAB)
DRAWN = msgspec.structs.replace(GREEDY, temperature=0.9, seed=11, top_p=0.9)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Name -> a reference, and the directory that it wrote."""
    found = {}
    for name in ("llama", "gemma3", "mistral"):
        folder = tmp_path_factory.mktemp("model")
        model = reference(name)
        model.save_pretrained(folder)
        found[name] = (model, folder)
    return found


def logits_of(runner: Any, ids: list[int]) -> torch.Tensor:
    """Of every position, in one piece."""
    sequence = Sequence(ids, SamplingParams(max_tokens=1))
    sequence.block_table = [*range(len(ids) // BLOCK_SIZE + 1)]
    with torch.inference_mode():
        runner.model.forward([Scheduled(sequence, len(ids))])
        return runner.model.logits([*range(len(ids))]).values.clone()


def streaming_logits(model: Any, ids: list[int], window: int, sinks: int) -> torch.Tensor:
    """StreamingLLM as it is described: positions are places in the cache, so after every id that
    goes, the keys behind it are turned back by one.
    """
    cache, found = DynamicCache(config=model.config), []
    for token_id in ids:
        place = torch.tensor([[cache.get_seq_length()]])
        step = model(torch.tensor([[token_id]]), cache=cache, position_ids=place)
        found.append(step.logits[0, 0])
        if place < sinks + window - 1:
            continue
        cos, sin = model.model.rotary_emb(torch.ones(1), torch.tensor([[-1]]))
        for layer in cache.layers:
            late = layer.keys[:, :, sinks + 1 :]
            a, b = late.chunk(2, dim=-1)
            turned = late * cos + torch.cat((-b, a), -1) * sin
            layer.keys = torch.cat((layer.keys[:, :, :sinks], turned), 2)
            kept = (layer.values[:, :, :sinks], layer.values[:, :, sinks + 1 :])
            layer.values = torch.cat(kept, 2)
    return torch.stack(found)


def test_sinks_are_streaming_llm(models):
    """Logits of every id of a text that is four times what is kept."""
    model, folder = models["llama"]
    found = logits_of(runner_of(folder, policy=SINKS), PROMPT)
    with torch.no_grad():
        expected = streaming_logits(model, PROMPT, SINKS.window, SINKS.sinks)
    torch.testing.assert_close(found, expected, atol=3e-4, rtol=1e-4)
    whole = logits_of(runner_of(folder), PROMPT)
    assert torch.equal(found[:56], whole[:56])
    assert (found[56:] - whole[56:]).abs().amax(-1).min() > 0.01


def test_a_window_is_that_of_a_model_which_has_it(models, tmp_path):
    """Bit for bit; and a model that has a smaller one is left as it is."""
    mistral, folder = models["mistral"]
    own = mistral.config.sliding_window
    mistral.config.sliding_window = None
    mistral.save_pretrained(tmp_path)
    mistral.config.sliding_window = own
    expected = logits_of(runner_of(folder), PROMPT)
    narrow, wide = KvPolicy(own, 0, 64), KvPolicy(2 * own, 0, 64)
    assert torch.equal(logits_of(runner_of(tmp_path, policy=narrow), PROMPT), expected)
    assert torch.equal(logits_of(runner_of(folder, policy=wide), PROMPT), expected)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize(
    ("policy", "kv_dtype"),
    [(SINKS, "auto"), (WINDOW, "auto"), (FULL, "int8"), (SINKS, "int8")],
)
def test_the_compiled_step_agrees_with_torch(models, name, policy, kv_dtype):
    """As near as it is without any policy: what weights in int8 cost a random model."""
    folder = models[name][1]
    exact = logits_of(runner_of(folder, policy=policy, kv_dtype=kv_dtype), PROMPT)
    compiled = int8_runner_of(folder, policy, kv_dtype)
    found = logits_of(compiled, PROMPT)
    compiled.model.decoder.close()
    assert (found - exact).square().mean().sqrt() < 0.08 * exact.std()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 0.02), (torch.bfloat16, 0.05)])
def test_int8_kv_is_near_to_what_it_rounds(models, dtype, bound):
    folder = models["llama"][1]
    exact = logits_of(runner_of(folder), PROMPT)
    found = logits_of(runner_of(folder, dtype, kv_dtype="int8"), PROMPT)
    assert 0 < (found - exact).square().mean().sqrt() < bound * exact.std()


ASKS = [Ask(PROMPT[60:90], DRAWN), Ask(PROMPT[3:4], GREEDY), Ask(PROMPT, DRAWN)]
WAYS = {"chunks": 7, "preemption": 50, "resume": 50}
TOLD = [("llama", SINKS, "int8"), ("llama", WINDOW, "auto"), ("gemma3", SINKS, "auto")]


@pytest.fixture(scope="module", params=TOLD, ids=lambda told: f"{told[0]}, {told[1]}, {told[2]}")
def runners(request, models):
    name, policy, kv_dtype = request.param
    folder = models[name][1]
    found = {
        "fp32": runner_of(folder, policy=policy, kv_dtype=kv_dtype),
        "int8": int8_runner_of(folder, policy, kv_dtype),
    }
    yield found
    found["int8"].model.decoder.close()


@pytest.fixture(scope="module")
def said_alone(runners):
    return {
        precision: [Core(runner, batch=1, chunk=64).answers([ask])[0] for ask in ASKS]
        for precision, runner in runners.items()
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_leg_is_bitwise_what_it_is_alone(runners, said_alone, precision, way):
    """Chunks, company, and beginning again somewhere else change no bit of any distribution."""
    runner, begin = runners[precision], 9 if way == "resume" else 0
    scarce = way == "preemption"  # three that have begun are too many
    num_blocks = runner.spec.kv_policy.blocks_max if scarce else None
    core = Core(runner, batch=len(ASKS), chunk=WAYS[way], num_blocks=num_blocks)
    chosen = [(ASKS[i], said_alone[precision][i]) for i in ([0, 1, 0] if scarce else [0, 1, 2])]
    asks = [ask._replace(output_ids=said.ids[:begin]) for ask, said in chosen]
    assert core.answers(asks) == [
        Answer(said.ids[begin:], said.logprobs[begin:], []) for _, said in chosen
    ]
    assert (core.num_preemptions > 0) == (way == "preemption")
    assert not any(core.num_cached_tokens)


def test_a_text_goes_on_past_the_context_in_the_blocks_of_one_window(models):
    """370 ids after a prompt of 150, of a model of 512, in a pool of 160; none is shared."""
    runner = int8_runner_of(models["llama"][1], SINKS)
    core = Core(runner, batch=1, chunk=64, num_blocks=SINKS.blocks_max)
    sampling = SamplingParams(max_tokens=370, temperature=0.8, seed=3)
    first, again = (core.answers([Ask(PROMPT, sampling)])[0] for _ in range(2))
    runner.model.decoder.close()
    assert SINKS.blocks_max * BLOCK_SIZE < len(PROMPT) < 512 < len(PROMPT) + len(first.ids)
    assert len(first.ids) == 370
    assert again == first
    assert core.num_cached_tokens == [0, 0]
    assert core.num_preemptions == 0


class Witness:
    """A model that only remembers which id of which leg was written where, and that no id misses
    what it is to see.
    """

    def __init__(self, policy: KvPolicy, num_blocks: int) -> None:
        self._policy = policy
        self._written = [(None, -1)] * (num_blocks * BLOCK_SIZE)

    def execute(self, batch: list[Scheduled]) -> list[Outcome]:
        for sequence, num_tokens in batch:
            first = sequence.num_computed_tokens
            for position in range(first, first + num_tokens):
                self._written[self._slot(sequence, position)] = (sequence, position)
            for position in range(first, first + num_tokens):
                self._check(sequence, position)
        return [Outcome(token_id=7 if row.samples else None) for row in batch]

    def _check(self, sequence: Sequence, position: int) -> None:
        window = range(max(0, position - self._policy.window + 1), position + 1)
        for seen in {*range(min(self._policy.sinks, position + 1)), *window}:
            assert self._written[self._slot(sequence, seen)] == (sequence, seen)

    def _slot(self, sequence: Sequence, position: int) -> int:
        index = position // BLOCK_SIZE
        if index >= self._policy.sink_blocks:
            index -= sequence.num_dropped_blocks
            assert index >= self._policy.sink_blocks or not sequence.num_dropped_blocks
        return sequence.block_table[index] * BLOCK_SIZE + position % BLOCK_SIZE


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 200), min_size=1, max_size=5),
    sinks=st.sampled_from([0, 16, 32]),
    window=st.integers(1, 60),
    step_tokens=st.integers(5, 70),
    spare=st.integers(0, 10),
)
def test_what_is_in_sight_is_held_and_little_more(prompts, sinks, window, step_tokens, spare):
    """Under preemption, too: no leg holds more blocks than it may, and all come back."""
    policy = KvPolicy(window, sinks, step_tokens)
    pool = BlockPool(policy.blocks_max + spare, BLOCK_SIZE)
    batcher = Batcher(pool, Pace(2.0), max_legs=5, max_batched_tokens=step_tokens, policy=policy)
    witness = Witness(policy, pool.num_blocks)
    sequences = [
        Sequence([1] * size, SamplingParams(max_tokens=80), private=True) for size in prompts
    ]
    for sequence in sequences:
        batcher.add(sequence)
    while batch := batcher.schedule():
        batcher.commit(batch, witness.execute(batch))
        batcher.check_integrity()
        for row in batch:
            assert len(row.sequence.block_table) <= policy.blocks_max
            if len(row.sequence.output_ids) == 80:
                batcher.remove(row.sequence)
    assert all(len(sequence.output_ids) == 80 for sequence in sequences)
    assert pool.num_available == pool.num_blocks
    assert pool.num_cached == 0


@pytest.mark.parametrize(
    ("told", "policy", "words"),
    [
        (("full", 0, 4), FULL, ""),
        (("window", 100, 4), KvPolicy(100, 0, 64), "window=100"),
        (("sinks", 100, 4), KvPolicy(100, 16, 64), "sinks=16, window=100"),
        (("sinks", 100, 17), KvPolicy(100, 32, 64), "sinks=32, window=100"),
    ],
)
def test_a_policy_is_what_was_told(told, policy, words):
    names = ("kv_policy", "kv_window", "kv_sinks")
    config = WorkerConfig(**dict(zip(names, told, strict=True)), max_batched_tokens=64)
    assert config.policy() == policy
    assert str(policy) == words
    assert policy.lossy == bool(words)


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_policy": "sinks"},
        {"kv_window": 64},
        {"kv_policy": "window", "kv_window": 64, "engine": "sim"},
        {"kv_dtype": "int8", "engine": "sim"},
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes):
    with pytest.raises(ValueError, match=r"kv_(window|policy)"):
        WorkerConfig(**changes)
