"""The default model finds prose as likely as `transformers` does on the same weights in fp32."""

import json
import math

import pytest

from services.gpu_worker.model_runner import load_runner
from services.tokenizer.tokenizer import Tokenizer
from shared.model_files import default_model, read_model
from shared.sampling import SamplingParams
from tests.golden.make import PERPLEXITY_FILE
from tests.golden.prompts import passages
from tests.services.gpu_worker.core_kit import Ask, Core

EXPECTED = json.loads(PERPLEXITY_FILE.read_text())


@pytest.mark.parametrize(
    ("quantize", "texts", "off_max"), [("none", 1, 1e-4), ("w8a8", 2, 1e-2)], ids=["fp32", "int8"]
)
def test_perplexity_is_that_of_transformers(quantize, texts, off_max):
    """Over public-domain prose and verse, from the logprobs that a client gets of its prompt: fp32
    within a hundredth of a percent, int8 within one. The rounding's part in int8 is a number of
    either sign per id, so it takes both texts to tell 1 % from chance (ADR 8).
    """
    tokenizer = Tokenizer(read_model(default_model()))
    runner = load_runner(
        default_model(),
        progress=[].append,
        dtype="fp32",
        quantize=quantize,
        num_blocks=140,
        kv_bytes_max=0,
        max_model_len=2240,
        num_threads=1,
        step_threads=1,
    )
    core = Core(runner, batch=1, chunk=256)
    loss = expected = count = 0.0
    for text, golden in zip(passages()[:texts], EXPECTED, strict=False):
        ids = tokenizer.encode(text)
        sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        [answer] = core.answers([Ask(ids, sampling)])
        logprobs = [entry.logprob for entry in answer.prompt_logprobs]
        assert len(logprobs) + 1 == len(ids) == golden["num_ids"] >= 1500
        loss -= math.fsum(logprobs)
        expected += math.log(golden["perplexity"]) * len(logprobs)
        count += len(logprobs)
    assert abs(math.expm1((loss - expected) / count)) < off_max
