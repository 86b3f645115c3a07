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


@pytest.mark.parametrize(("quantize", "off_max"), [("none", 1e-4), ("w8a8", 1e-2)])
def test_perplexity_is_that_of_transformers(quantize, off_max):
    """Over public-domain prose and verse, from the logprobs that a client gets of its prompt: fp32
    within a hundredth of a percent, int8 within one.
    """
    ids = Tokenizer(read_model(default_model())).encode(passages())
    runner = load_runner(
        default_model(),
        progress=[].append,
        dtype="fp32",
        quantize=quantize,
        num_blocks=128,
        kv_bytes_max=0,
        max_model_len=2000,
        num_threads=1,
    )
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    [answer] = Core(runner, batch=1, chunk=256).answers([Ask(ids, sampling)])
    logprobs = [entry.logprob for entry in answer.prompt_logprobs]

    assert len(logprobs) + 1 == len(ids) == EXPECTED["num_ids"] >= 1500
    perplexity = math.exp(-math.fsum(logprobs) / len(logprobs))
    assert math.isclose(perplexity, EXPECTED["perplexity"], rel_tol=off_max)
