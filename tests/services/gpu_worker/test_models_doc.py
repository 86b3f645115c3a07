"""`docs/models.md` says what the tests check. `WRITE_DOCS=1` writes it."""

import os
from pathlib import Path

from services.gpu_worker.loader.gguf import _FORMATS
from services.gpu_worker.models.families import FAMILIES
from services.tokenizer.encoders import _WORDS
from tests.services.gpu_worker.test_gguf_families import ARCHITECTURES
from tests.services.gpu_worker.tiny_families import CASES

DOC = Path(__file__).parents[3] / "docs" / "models.md"
HEAD = """\
# Models: what is read, and what is proven of it

Written by `WRITE_DOCS=1 pytest tests/services/gpu_worker/test_models_doc.py`; the test of that name
fails when this page and the tests part.

Each line is a tiny random checkpoint made and answered by `transformers` in fp32. *Logits, ids*:
the logits of every new id within 2e-4 and the greedy ids equal, after a prompt in chunks and decode
beyond the sliding window (`test_families.py`; GGUF: `test_gguf_families.py`). *Bitwise*: the ids
and logprobs of a leg are the same bits alone, in company, and in any chunks. *bf16*: its logits are
off from fp32's by less than 6 % of their spread.

"""
TAIL = """
## The default model

Greedy ids of 35 prompts (1 to 2,000 ids, many languages, code, emoji, whitespace) equal those that
`transformers` computed in fp32 from the same dequantized weights, over batch sizes, chunkings and
resumes (`test_golden.py`, `tests/golden/`). Its tokenizer agrees with byte-level BPE written from
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


def page():
    lines = [
        "| model | directory: logits, ids | bitwise | bf16 | GGUF: logits, ids |",
        "|---|---|---|---|---|",
    ]
    for name in CASES:
        gguf = "yes" if name in ARCHITECTURES else "not tested"
        lines.append(f"| {name} | yes | yes | yes | {gguf} |")
    formats = ", ".join(kind.name for kind in _FORMATS.values())
    words = ", ".join(f"`{name}`" for name in ("gpt-2", "smollm", *_WORDS))
    return HEAD + "\n".join(lines) + "\n" + TAIL.format(formats=formats, words=words)


def test_the_page_is_what_the_tests_check():
    if os.environ.get("WRITE_DOCS"):
        DOC.write_text(page())
    assert DOC.read_text() == page()


def test_every_family_is_checked_in_both_formats():
    checked = {name.split(",")[0] for name in CASES}
    assert checked == {*FAMILIES}
    assert {*ARCHITECTURES.values()} == {*FAMILIES} - {"mistral"}  # whose GGUF says llama
