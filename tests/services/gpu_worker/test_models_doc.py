"""`docs/models.md` says what the tests check. `WRITE_DOCS=1` writes it."""

import os
from pathlib import Path

import pytest

from services.gpu_worker.loader.gguf import _FORMATS
from services.gpu_worker.models.families import FAMILIES
from services.tokenizer.encoders import _WORDS
from tests.services.gpu_worker.test_families import WAYS
from tests.services.gpu_worker.test_gguf_families import ARCHITECTURES
from tests.services.gpu_worker.tiny_families import CASES

DOC = Path(__file__).parents[3] / "docs" / "models.md"
HEAD = """\
# Models: what is read, and what is proven of it

Each *yes* is a test that passed when this page was written, by `WRITE_DOCS=1 pytest
tests/services/gpu_worker -k 'families or fused or models_doc'`; a run of all tests fails if the
page says anything else than what passed in it.

Each line is a tiny random checkpoint made and answered by `transformers` in fp32. *Logits, ids*:
the logits of every new id within 2e-4 and the greedy ids equal, after a prompt in chunks and decode
beyond the sliding window (`test_families.py`; GGUF: `test_gguf_families.py`). *Bitwise*: in fp32
the ids of a leg, greedy or drawn, and whole distributions are the same bits as alone: in the
company of other legs, with its prompt in chunks, behind a prefix found in the cache, after a
preemption, and resumed from what was delivered. *bf16*, *int8*: logits are off from fp32's by less
than 6 % and 8 % of their spread (a random model's logits are all noise; a trained one loses less,
see below). *int8 bitwise*: all five of these, computed by the compiled step.

"""
TAIL = """
## The default model

In int8 its perplexity on prose and verse is within 1 % of fp32's (`test_perplexity.py`). In fp32,
greedy ids of 35 prompts (1 to 2,000 ids, many languages, code, emoji, whitespace) equal those that
`transformers` computed in fp32 from the same dequantized weights, over pairs of batch size, chunk
and event: prefix hit, preemption, resume (`test_golden.py`, `tests/golden/`). Its perplexity on
prose and verse equals that of `transformers` within 0.01 % (`test_perplexity.py`). Answers over
HTTP are the same one by one and 32 at once (`tests/mesh/test_invariance.py`; `make invariance` asks
200, with `ARGS='--precision int8'` in int8). Its tokenizer agrees with byte-level BPE written from
its description on odd and on random strings (`tests/services/tokenizer/test_parity.py`).

## GGUF

Formats: {formats}. Q4_K, Q5_K and Q6_K are compared with a decoder written from their description,
the others with what the `gguf` package wrote.

## Vocabularies

Byte-level BPE (`tokenizer.ggml.model` = `gpt2`, pre-tokenizers {words}) and
SentencePiece of type BPE (`llama`), from GGUF, from `tokenizer.json`, and from `tokenizer.model`
where a directory has no other; Unigram is refused by name. Ids of odd strings, alone and in chats,
equal those of `transformers` for a directory of every family
(`tests/services/tokenizer/test_hugging_face.py`) and for GGUF files of Gemma and Phi-3; alone, for
GGUF vocabularies of Llama 3, SmolLM2 and Qwen (`test_gguf_vocabularies.py`). Those of random
strings as well equal `sentencepiece`'s for tiny models of every option and for Mistral 7B's own
(`test_spm.py`). `tekken` is checked with the first 20,000 tokens of Mistral Nemo's own file.

In a GGUF file and in a `tokenizer.model`, text between control tokens is encoded like a text of its
own, with its space before it, as SentencePiece's own callers and llama.cpp do; a `tokenizer.json`
says itself what it wants.

## Not read, and refused by name

Mixtures of experts; Gemma 3 with images (`model_type` `gemma3`); pickled weights (`.bin`, `.pt`);
GGUF files in several parts. Models with rope scaling `longrope` or `dynamic` serve the length of
their first training, since past it the frequencies of keys already cached would change. A Mistral
or Qwen GGUF has a sliding window only if the file names one (Mistral) or never (Qwen): the usual
converter writes none.
"""


# What a column claims of a model, and the test that proves it
_LOGITS = "test_logits_and_greedy_ids_equal_those_of_transformers"
_BITWISE = "test_families.py::test_a_leg_is_bitwise_what_it_is_alone"
COLUMNS = {
    "directory: logits, ids": [f"test_families.py::{_LOGITS}[{{model}}]"],
    **{f"bitwise: {way}": [f"{_BITWISE}[{{model}}-fp32-{way}]"] for way in WAYS},
    "bf16": ["test_families.py::test_bf16_says_nearly_the_same[{model}]"],
    "int8": ["test_fused.py::test_logits_are_near_those_of_transformers[{model}]"],
    "int8 bitwise: all five": [f"{_BITWISE}[{{model}}-int8-{way}]" for way in WAYS],
    "GGUF: logits, ids": [f"test_gguf_families.py::{_LOGITS}[{{model}}]"],
}


def page(passed):
    lines = ["| model | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for model in CASES:
        proven = [
            passed.issuperset(test.format(model=model) for test in tests)
            for tests in COLUMNS.values()
        ]
        cells = ["yes" if cell else "not tested" for cell in proven]
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    formats = ", ".join(_FORMATS.values())
    words = ", ".join(f"`{name}`" for name in ("gpt-2", "smollm", *_WORDS))
    return HEAD + "\n".join(lines) + "\n" + TAIL.format(formats=formats, words=words)


@pytest.fixture
def everything(request, passed):
    """What has passed, if the tests that the page speaks of were asked to run before it."""
    files = {item.path.name for item in request.session.items}
    if not files >= {test.partition("::")[0] for tests in COLUMNS.values() for test in tests}:
        pytest.skip("the page is checked where the tests of all families run")
    return passed


def test_the_page_is_what_the_tests_check(everything):
    """A cell says yes if its test has passed in this very run, and not otherwise."""
    if os.environ.get("WRITE_DOCS"):
        DOC.write_text(page(everything))
    assert DOC.read_text() == page(everything)


def test_every_family_is_checked_in_both_formats():
    checked = {name.split(",")[0] for name in CASES}
    assert checked == {*FAMILIES}
    assert {*ARCHITECTURES.values()} == {*FAMILIES} - {"mistral"}  # whose GGUF says llama
