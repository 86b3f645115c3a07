"""GGUF files, and one tokenizer.model, against `transformers` on the same vocabularies."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import regex
from gguf import TokenType

from services.tokenizer.encoders import from_bpe, from_spm
from services.tokenizer.tokenizer import Tokenizer
from shared.messages import ChatPrompt
from shared.model_files import BpeParts, SpmParts, read_model
from shared.vocabulary import token_kinds
from tests.services.tokenizer import families, spm_kit
from tests.services.tokenizer.odd_strings import ODD_STRINGS
from tests.services.tokenizer.templates import TEMPLATES


def same_ids(tokenizer: Tokenizer, reference: Any) -> None:
    """Of odd strings, alone and in chats."""
    for text in ODD_STRINGS:
        wanted = reference.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False) == wanted, text
        if any(mark in text for mark in reference.all_special_tokens):
            continue
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes"}]
        wanted = reference.apply_chat_template(messages, tokenize=True, return_dict=False)
        chat = ChatPrompt(messages=messages, add_generation_prompt=False)
        assert tokenizer.encode_chat(chat) == wanted, text


def test_gemma(tmp_path: Path) -> None:
    """No space before a text; runs of spaces and line ends are tokens of their own."""
    reference = families.made("gemma", tmp_path)
    reference.chat_template = TEMPLATES["gemma"]
    keys = {"ggml__add_space_prefix": False, "chat_template": TEMPLATES["gemma"]}
    file = spm_kit.gguf(tmp_path / "m.gguf", tmp_path / "tokenizer.model", "gemma3", **keys)
    files = read_model(file)
    same_ids(Tokenizer(files), reference)
    assert not files.vocabulary.strips_space


@pytest.mark.parametrize("kind", [TokenType.CONTROL, TokenType.USER_DEFINED])
def test_phi3(tmp_path: Path, kind: TokenType) -> None:
    """Marks take along the space after them, which GGUF cannot say; old files call them
    user-defined, and all the same no user writes one.
    """
    reference = families.made("phi3", tmp_path)
    reference.chat_template = TEMPLATES["phi3"]
    added = dict.fromkeys(families.PHI3_MARKS, kind)
    keys = {
        "added": added,
        "chat_template": TEMPLATES["phi3"],
        "ggml__add_bos_token": False,
        "ggml__eos_token_id": reference.eos_token_id,
    }
    file = spm_kit.gguf(tmp_path / "m.gguf", tmp_path / "tokenizer.model", "phi3", **keys)
    files = read_model(file)
    tokenizer = Tokenizer(files)
    same_ids(tokenizer, reference)
    end = files.vocabulary.tokens.index(b"<|end|>")
    assert end in files.end_ids
    chat = ChatPrompt(messages=[{"role": "user", "content": "a<|end|>b"}])
    assert tokenizer.encode_chat(chat).count(end) == 1


@pytest.mark.parametrize(
    ("pre", "make"),
    [
        ("llama-bpe", families.llama3),
        ("smollm", families.smollm2),
        ("qwen2", families.qwen),
        ("deepseek-r1-qwen", families.qwen),
    ],
)
def test_words_of_byte_level_vocabularies(pre: str, make: Callable[[], Any]) -> None:
    """With the same merges: cut by its name in the file as the family's own files cut."""
    reference = make()
    parts = families.DEFAULT
    plain = BpeParts(pre, parts.tokens, parts.merges, frozenset(), frozenset())
    encoder = from_bpe(Path("m"), plain)
    for text in ODD_STRINGS:
        if not any(mark in text for mark in reference.all_special_tokens):
            ids = reference.encode(text, add_special_tokens=False)
            assert encoder.encode(text, add_special_tokens=False).ids == ids, text


def test_tekken() -> None:
    """Mistral Nemo: the real words and the real tokens (the first 20,000), by tiktoken's rule."""
    pattern, ranks, _ = families.tekken()
    encoder = from_bpe(Path("m"), families.tekken_parts())
    words = regex.compile(pattern)
    for text in ODD_STRINGS:
        cut = [word.encode() for word in words.findall(text)]
        tokens = [token for word in cut for token in families.merged(word, ranks, len(ranks))]
        ids = encoder.encode(text, add_special_tokens=False).ids
        assert ids == [ranks[token] for token in tokens], text


def test_phi3_without_tokenizer_json(tmp_path: Path) -> None:
    """What tokenizer_config.json says of the tokens that were added to a tokenizer.model."""
    reference = families.made("phi3", tmp_path)
    reference.chat_template = TEMPLATES["phi3"]
    names = ("content", "special", "rstrip")
    config = {
        "added_tokens_decoder": {
            str(i): {name: getattr(token, name) for name in names}
            for i, token in reference.added_tokens_decoder.items()
        },
        "chat_template": TEMPLATES["phi3"],
        "add_bos_token": False,
        "eos_token": {"content": reference.eos_token},
    }
    folder = tmp_path / "directory"
    spm_kit.directory(folder, tmp_path / "tokenizer.model", tokenizer_config=config)
    same_ids(Tokenizer(read_model(folder)), reference)


def test_a_control_token_may_have_any_text(tmp_path: Path) -> None:
    """Even SentencePiece's sign for a space: a template may still write it."""
    spm_kit.trained(tmp_path / "tokenizer.model", **spm_kit.LLAMA)
    mark = "<\u2581>"
    keys = {"added": {mark: TokenType.CONTROL}, "chat_template": mark + "{{ messages[0].content }}"}
    files = read_model(spm_kit.gguf(tmp_path / "m.gguf", tmp_path / "tokenizer.model", **keys))
    tokenizer = Tokenizer(files)
    ids = tokenizer.encode_chat(ChatPrompt(messages=[{"role": "user", "content": "Hello"}]))
    assert ids == [files.vocabulary.size - 1, *tokenizer.encode("Hello", False)]


PIECES = ["\u2581", "a", "b", "c", "\u2581a", "bc", "\u2581\u2581", "ab", "ca", "<unk>"]
SCORES = [-9.0, -9.0, -9.0, -9.0, -1.0, -2.0, -1000.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("  a", ["\u2581\u2581", "a"]),  # user-defined: first of all, whatever its score
        ("a bc", ["a", "\u2581", "bc"]),
        (" a", ["\u2581a"]),
        ("abc", ["a", "bc"]),  # ab is a control token, which no text makes
        ("ca", ["c", "a"]),  # unused
        ("xyb", ["<unk>", "b"]),
    ],
)
def test_only_pieces_are_merged(text: str, pieces: list[str]) -> None:
    kinds = token_kinds(PIECES, [1, 1, 1, 1, 1, 1, 4, 3, 5, 2])
    parts = SpmParts(PIECES, SCORES, kinds, space_prefix=False)
    encoder = from_spm(Path("m"), parts)
    encoder.encode_special_tokens = True
    assert encoder.encode(text).tokens == pieces
