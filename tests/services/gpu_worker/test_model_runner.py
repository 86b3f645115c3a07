"""The default model in the real runner, against a reference that shares no code with it."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from kernels.cpu.library import library
from services.gpu_worker import model_runner
from services.gpu_worker.kv_policy import KvPolicy
from services.gpu_worker.model_runner import (
    SCORE_TILE,
    DecoderRunner,
    compute_dtype,
    load_runner,
)
from services.gpu_worker.runner import Outcome, Scheduled
from services.gpu_worker.sequence import Sequence
from services.gpu_worker.torch_model import QUERY_TILE
from services.tokenizer.tokenizer import Tokenizer
from shared.gguf_file import read_gguf
from shared.ids import unpack_ids
from shared.kv import BLOCK_SIZE
from shared.messages import ChatPrompt
from shared.model_files import default_model, read_model
from shared.sampling import SamplingParams
from tests.golden.make import reference
from tests.services.gpu_worker.legs_kit import Legs, assert_as_good

VOCAB = 49_152


def load(dtype="fp32", **changes):
    settings = {
        "dtype": dtype,
        "quantize": "none",
        "num_blocks": 128,
        "kv_bytes_max": 0,
        "max_model_len": None,
        "num_threads": 1,
        "step_threads": 1,
        "progress": [].append,
    }
    return load_runner(default_model(), **(settings | changes))


@pytest.fixture(scope="module")
def runner():
    return load()


@pytest.fixture(scope="module")
def coarse():
    return load("bf16")


TEXT = (
    "The lighthouse at the end of the pier had been dark for eleven years. Nobody in the village "
    "spoke of it, and the children were told that the stairs had fallen in. But on the night of "
    "the storm, when the boats came home one by one, a light went round above the rocks again, "
    "slow and even, as if it had never stopped. "
)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(read_model(default_model()))


@pytest.fixture(scope="module")
def ids(tokenizer):
    """About 400 ids of prose."""
    return tokenizer.encode(TEXT * 6)


def reference_logits(ids):
    """Logits of every position, straight from the file: dense, fp32, nothing fused or packed.

    Rotary pairs are interleaved here, as the file has them; the loader reorders, this does not.
    """
    path = default_model()
    head = read_gguf(path)
    data = path.read_bytes()

    def tensor(name):
        info = head.tensors[f"{name}.weight"]
        raw = np.frombuffer(data, np.uint8, info.num_bytes, info.offset)
        kind = GGMLQuantizationType(info.ggml_type)
        rows = raw.reshape(info.shape[0], -1) if len(info.shape) == 2 else raw
        return torch.from_numpy(dequantize(rows, kind).reshape(info.shape).copy())

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * tensor(name)

    tokens = len(ids)
    angles = torch.outer(
        torch.arange(tokens, dtype=torch.float64), 100_000.0 ** -(torch.arange(32).double() / 32)
    )
    turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)[:, None]

    def rotated(x):
        pairs = torch.view_as_complex(x.reshape(tokens, -1, 32, 2).contiguous())
        return torch.view_as_real(pairs * turn).reshape(tokens, -1, 64)

    embedding = tensor("token_embd")
    hidden = embedding[torch.tensor(ids)]
    for i in range(head.metadata["llama.block_count"]):
        x = norm(hidden, f"blk.{i}.attn_norm")
        queries = rotated(x @ tensor(f"blk.{i}.attn_q").T)
        keys = rotated(x @ tensor(f"blk.{i}.attn_k").T).repeat_interleave(3, dim=1)
        values = (x @ tensor(f"blk.{i}.attn_v").T).view(tokens, 3, 64).repeat_interleave(3, dim=1)
        out = F.scaled_dot_product_attention(
            queries.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), is_causal=True
        )
        hidden = (
            hidden + out.transpose(0, 1).reshape(tokens, 576) @ tensor(f"blk.{i}.attn_output").T
        )
        x = norm(hidden, f"blk.{i}.ffn_norm")
        gate = x @ tensor(f"blk.{i}.ffn_gate").T
        up = x @ tensor(f"blk.{i}.ffn_up").T
        hidden = hidden + (gate * torch.sigmoid(gate) * up) @ tensor(f"blk.{i}.ffn_down").T
    return norm(hidden, "output_norm") @ embedding.T


def test_the_forward_agrees_with_a_plain_reference(runner, ids):
    """Whole distributions at the last prompt id and along 8 greedy ids; the same ids."""
    legs = Legs(runner)
    leg = legs.add(ids[:150], logprobs=VOCAB)
    [results] = legs.run({leg: 1000}, 8)
    logprobs = torch.log_softmax(reference_logits(leg.prompt_ids + leg.output_ids), dim=-1)
    for step, sampled in enumerate(results):
        expected = logprobs[149 + step]
        assert sampled.token_id == int(expected.argmax())
        found = torch.empty(VOCAB)
        found[unpack_ids(sampled.logprobs.top_ids)] = torch.tensor(sampled.logprobs.top_logprobs)
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-4)


def test_it_knows_the_capital_of_france(runner, tokenizer):
    assert "Paris" in answer(runner, tokenizer, "What is the capital of France?")


def answer(runner, tokenizer, question):
    chat = ChatPrompt(messages=[{"role": "user", "content": question}])
    legs = Legs(runner)
    [results] = legs.run({legs.add(tokenizer.encode_chat(chat)): 1000}, 8)
    return read_model(default_model()).vocabulary.text((s.token_id for s in results), True)


def test_a_leg_in_fp32_is_bitwise_the_same_however_it_is_batched(runner, ids):
    """Ids and logprobs, whole or in chunks of any size, alone or in changing company."""
    long, short, tiny = ids[: QUERY_TILE * 2 + 5], ids[40:100], ids[7:8]

    def alone(prompt, **params):
        legs = Legs(runner)
        return legs.run({legs.add(prompt, **params): 1000}, 4)[0]

    prompts = {"long": long, "short": short, "tiny": tiny}
    params = {"long": {}, "short": {"temperature": 0.8, "seed": 11}, "tiny": {"logprobs": 20}}
    expected = {name: alone(prompts[name], **params[name]) for name in prompts}
    for budgets in ((1000, 1000, 1000), (QUERY_TILE + 1, 17, 1), (50, 7, 1)):
        legs = Legs(runner)
        added = [legs.add(prompts[name], **params[name]) for name in prompts]
        results = legs.run(dict(zip(added, budgets, strict=True)), 4)
        assert dict(zip(prompts, results, strict=True)) == expected, budgets


def scored(runner, ids, chunk, company=()):
    """The prompt logprobs of `ids`, computed in chunks beside a leg that computes `company`."""
    leg = Sequence(ids, SamplingParams(max_tokens=1, prompt_logprobs=3), scores=[])
    leg.block_table = [*range(-(-len(ids) // BLOCK_SIZE))]
    other = Sequence(list(company), SamplingParams(max_tokens=1))
    other.block_table = [*range(100, 100 + -(-len(company) // BLOCK_SIZE))]
    while leg.num_computed_tokens < leg.num_tokens:
        row = Scheduled(leg, min(chunk, leg.num_tokens - leg.num_computed_tokens))
        batch = [Scheduled(other, len(company)), row] if company else [row]
        leg.scores += runner.execute(batch)[-1].scores
        leg.num_computed_tokens += row.num_tokens
    return leg.scores


def test_prompt_logprobs_are_those_of_transformers(runner, ids):
    """Of each id but the first: its logprob, its rank, and the best ids of its position."""
    prompt = ids[:150]
    with torch.inference_mode():
        logits = reference().forward(torch.tensor([prompt]), use_cache=False).logits[0, :-1]
    expected = torch.log_softmax(logits, -1)
    own = expected.gather(1, torch.tensor(prompt[1:])[:, None])
    scores = scored(runner, prompt, 1000)

    assert len(scores) == len(prompt) - 1
    found = torch.tensor([score.logprobs.logprob for score in scores])
    torch.testing.assert_close(found, own[:, 0], atol=1e-4, rtol=1e-4)
    assert [score.rank for score in scores] == ((expected > own).sum(-1) + 1).tolist()
    best = torch.tensor([score.logprobs.top_logprobs for score in scores])
    torch.testing.assert_close(best, expected.topk(3).values, atol=1e-4, rtol=1e-4)
    for score, of_row in zip(scores, expected, strict=True):
        of_ids = of_row[unpack_ids(score.logprobs.top_ids)]
        torch.testing.assert_close(of_ids, of_row.topk(3).values, atol=1e-4, rtol=1e-4)


def test_prompt_logprobs_in_fp32_are_bitwise_the_same_in_any_chunks(runner, ids):
    """Chunks that end inside tiles of attention and of scores, alone and in company."""
    prompt = ids[: QUERY_TILE + SCORE_TILE + 3]
    expected = scored(runner, prompt, 1000)
    for chunk in (17, SCORE_TILE + 1, QUERY_TILE + 1):
        assert scored(runner, prompt, chunk) == expected, chunk
    assert scored(runner, prompt[:40], 1) == expected[:39]
    assert scored(runner, prompt, 50, company=ids[200:233]) == expected


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "top_p": 0.95, "seed": 2**64 - 1}])
def test_a_resumed_leg_goes_on_as_if_nothing_had_happened(runner, ids, params):
    """Its ids are the prompt and what was delivered; the rest is drawn as it would have been."""
    params = params | {"repetition_penalty": 1.1, "frequency_penalty": 0.2}
    legs = Legs(runner)
    [undisturbed] = legs.run({legs.add(ids[:60], **params): 1000}, 12)
    delivered = [sampled.token_id for sampled in undisturbed[:5]]
    legs = Legs(runner)
    company = legs.add(ids[100:120])
    resumed = legs.add(ids[:60], delivered, **params)
    legs.step({company: 20})
    results = legs.run({resumed: 33, company: 1}, 7)
    assert results[0] == undisturbed[5:]


def test_a_leg_with_broken_keys_fails_alone_and_its_blocks_can_be_used_again(runner, ids):
    """NaN in one leg's memory reaches neither its companion nor the next owner of its blocks."""
    legs = Legs(runner)
    sound, broken = legs.add(ids[:40]), legs.add(ids[50:90])
    [expected] = legs.run({sound: 1000}, 3)
    legs.run({broken: 1000}, 1)
    blocks = torch.tensor(broken.block_table)
    runner.model.pool.index_fill_(3, blocks, math.nan)
    again = legs.add(ids[:40])
    legs.step({broken: 1, again: 1000})
    assert legs.results[broken][-1].fault == "nan_logits"
    heir = legs.add(ids[:40])
    heir.block_table = broken.block_table
    results = legs.run({again: 1000, heir: 9}, 3)
    assert results == [expected, expected]
    runner.model.pool.index_fill_(3, blocks, 0)


def test_rows_that_do_not_reach_the_last_id_sample_nothing(runner, ids):
    leg = Sequence(ids[:20], SamplingParams(max_tokens=1), block_table=[0, 1])
    assert runner.execute([Scheduled(leg, 19)]) == [Outcome()]
    assert leg.num_computed_tokens == 0
    assert leg.output_ids == []


def test_the_bound_of_a_step_grows_with_its_work(coarse, ids):
    """Before the warm-up it is generous, after it never below five seconds."""
    runner = DecoderRunner(coarse.model, coarse.spec)
    small = Scheduled(Sequence(ids[:1], SamplingParams(max_tokens=1)), 1)
    large = Scheduled(Sequence(ids * 4, SamplingParams(max_tokens=1)), len(ids) * 4)
    assert runner.phase_bound_ms([small]) == 60_000
    runner.warm_up()
    assert 5_000 <= runner.phase_bound_ms([small]) < runner.phase_bound_ms([large] * 50)


def test_bf16_says_nearly_the_same(runner, coarse, ids, tokenizer):
    """Mean divergence from fp32 along real text stays where rounding alone puts it."""
    assert "Paris" in answer(coarse, tokenizer, "What is the capital of France?")
    divergences = []
    for length in range(60, 260, 40):
        found = []
        for model in (runner, coarse):
            legs = Legs(model)
            [[sampled]] = legs.run({legs.add(ids[:length], logprobs=VOCAB): 1000}, 1)
            row = torch.empty(VOCAB)
            row[unpack_ids(sampled.logprobs.top_ids)] = torch.tensor(sampled.logprobs.top_logprobs)
            found.append(row)
        divergences.append(F.kl_div(found[1], found[0], log_target=True, reduction="sum").item())
    assert sum(divergences) / len(divergences) < 0.01


def test_auto_is_a_precision_that_exists():
    assert compute_dtype("auto") in (torch.float32, torch.bfloat16)
    with pytest.raises(ValueError, match="dtype: 'fp8'"):
        compute_dtype("fp8")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_blocks": None, "kv_bytes_max": 1000}, "kv_bytes_max"),
        ({"max_model_len": 128 * BLOCK_SIZE + 1}, "max_model_len"),
        ({"num_blocks": 10_000, "max_model_len": 8193}, "max_model_len"),
        ({"kv_policy": KvPolicy.of(8190, 4, 64)}, "kv_window: 8190 ids, 16 of sinks"),
        ({"kv_policy": KvPolicy.of(64, 4, 256), "num_blocks": 22}, "kv_window: a leg takes 23"),
        ({"kv_policy": KvPolicy.of(64, 4, 64), "max_model_len": (1 << 17) + 1}, "max_model_len"),
        ({"kv_policy": KvPolicy.of(64, 0, 64), "max_model_len": 8193}, "max_model_len"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        load(**changes)


def test_the_spec_says_what_was_loaded(runner):
    """Here the KV pool, not the model, is what limits a leg."""
    spec = runner.spec
    assert (spec.vocab_size, spec.num_blocks, spec.block_size) == (VOCAB, 128, BLOCK_SIZE)
    assert spec.max_model_len == 128 * BLOCK_SIZE
    assert spec.end_ids == read_model(default_model()).end_ids


def test_int8_is_taken_by_rule(monkeypatch):
    """Where the processor has dot instructions, unless a dtype is named; and where it is asked for,
    whatever the processor.
    """

    def taken(dtype, quantize, flags):
        monkeypatch.setattr(model_runner, "cpu_flags", lambda: flags)
        return model_runner.computes_int8({"dtype": dtype, "quantize": quantize})

    fast, slow = {b"avx512_vnni"}, {b"avx2"}
    assert taken("auto", "auto", fast)
    assert not taken("auto", "auto", slow)
    assert not taken("bf16", "auto", fast)
    assert not taken("auto", "none", fast)
    assert taken("fp32", "w8a8", slow)
    with pytest.raises(ValueError, match="quantize: 'int3' is not one of"):
        taken("auto", "int3", fast)


def test_without_a_compiler_torch_computes_unless_int8_was_asked_for(monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    library.cache_clear()
    assert not model_runner.computes_int8({"dtype": "auto", "quantize": "auto"})
    with pytest.raises(ValueError, match="quantize: /nonexistent/c"):
        model_runner.computes_int8({"dtype": "auto", "quantize": "w8a8"})
    library.cache_clear()


def test_blocks_can_be_carried(runner, ids):
    """All layers and heads of a block, and nothing of others."""
    assert_as_good(Legs(runner), ids[:200])
