"""Ids of the default model: known ones, an independent encoder, and the way back."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from services.tokenizer.tokenizer import Tokenizer
from shared.errors import ContextLengthExceeded, InvalidRequest
from shared.messages import ChatPrompt
from shared.model_files import (
    BpeParts,
    ModelFileError,
    ModelFiles,
    default_model,
    read_model,
)
from shared.vocabulary import byte_alphabet

FILES = read_model(default_model())
TOKENIZER = Tokenizer(FILES)
TOKENS = {raw: i for i, raw in enumerate(FILES.vocabulary.tokens)}
IM_START, IM_END = 1, 2


class PlainBpe:
    """Byte-level BPE as its paper has it: words, then the earliest merge until none is left."""

    # GPT-2's words, with \p{L} and \p{N} written for Python's `re`; digits stand alone.
    _words = re.compile(
        r"\d|'s|'t|'re|'ve|'m|'ll|'d| ?[^\W\d_]+| ?(?:[^\s\w]|_)+|\s+(?!\S)(?!\d)|\s+"
    )

    def __init__(self, parts: BpeParts) -> None:
        self._ids = {token: i for i, token in enumerate(parts.tokens)}
        pairs = (tuple(merge.split(" ")) for merge in parts.merges)
        self._ranks = {pair: rank for rank, pair in enumerate(pairs)}
        self._chars = {byte: char for char, byte in byte_alphabet().items()}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for run in re.split(r"(\d)", text):  # a digit is a word before anything else is cut
            for word in self._words.findall(run):
                ids += self._word([self._chars[byte] for byte in word.encode()])
        return ids

    def _word(self, parts: list[str]) -> list[int]:
        while len(parts) > 1:
            ranked = [
                (self._ranks[pair], place)
                for place, pair in enumerate(pairwise(parts))
                if pair in self._ranks
            ]
            if not ranked:
                break
            _, place = min(ranked)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        return [self._ids[part] for part in parts]


assert FILES.bpe is not None
PLAIN = PlainBpe(FILES.bpe)


def decode(ids: list[int]) -> str:
    return FILES.vocabulary.text(ids, skip_special_tokens=False)


def test_known_ids() -> None:
    """Ids that follow from the vocabulary by hand: whole words, single digits, control tokens."""
    assert TOKENIZER.encode("Hello world") == [TOKENS[b"Hello"], TOKENS[b" world"]]
    assert TOKENIZER.encode("2026") == [TOKENS[b"2"], TOKENS[b"0"], TOKENS[b"2"], TOKENS[b"6"]]
    assert TOKENIZER.encode("<|im_start|>a<|im_end|>") == [IM_START, TOKENS[b"a"], IM_END]
    assert TOKENIZER.encode("") == []


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.text(max_size=40),
        st.text("abcDEF 019'é€😀\n\t_.,-!?", max_size=60),
        st.lists(
            st.sampled_from(["the", " quick", "'s", "'RE", "  ", "\r\n", "x1y22", "naïve"])
        ).map("".join),
    )
)
def test_decode_undoes_encode(text: str) -> None:
    """No text is lost or changed on the way to ids and back, but for bytes that the model lacks:
    this one has no token for a few control characters and for the planes 4 to 11.
    """
    ids = TOKENIZER.encode(text)
    known = bytes(byte for byte in text.encode() if bytes([byte]) in TOKENS)
    assert decode(ids) == known.decode("utf-8", "replace")
    assert all(0 <= i < FILES.vocabulary.size for i in ids)


@settings(max_examples=200, deadline=None)
@given(st.text("abcdefghijklmnopqrstuvwxyzABCXYZ 0123456789'.,!?-\n", max_size=60))
def test_agrees_with_an_independent_encoder(text: str) -> None:
    """The library, fed from the file, gives the ids that the algorithm gives by hand."""
    assert TOKENIZER.encode(text) == PLAIN.encode(text)


@pytest.mark.parametrize(
    "text",
    [
        "The answer is 42. It's what we'd expect, isn't it?",
        "def f(x):\n    return x ** 2  # square\n",
        "Straße, naïve café, Ελλάδα, 日本語, 한국어, عربى",
        "   leading and trailing   ",
        "emoji 😀👍🏽 and e\u0301 combining",
    ],
)
def test_texts_agree_with_an_independent_encoder(text: str) -> None:
    assert TOKENIZER.encode(text) == PLAIN.encode(text)


def test_bos_once() -> None:
    """A model that wants a beginning-of-text id gets one, even if the text brings it along."""
    tokenizer = Tokenizer(replace(FILES, add_bos=True))
    plain = TOKENIZER.encode("hi")
    assert tokenizer.encode("hi") == [IM_START, *plain]
    assert tokenizer.encode("<|im_start|>hi") == [IM_START, *plain]
    assert tokenizer.encode("hi", add_special_tokens=False) == plain
    assert tokenizer.encode("") == [IM_START]


def test_template_brings_its_own_bos() -> None:
    """A rendered chat gets no second beginning-of-text id."""
    chat = ChatPrompt(messages=[{"role": "user", "content": "hi"}])
    with_bos = Tokenizer(replace(FILES, add_bos=True)).encode_chat(chat)
    assert with_bos == TOKENIZER.encode_chat(chat)
    assert with_bos[:2] != [IM_START, IM_START]


def test_chat_of_the_default_model() -> None:
    """The model's own words around the user's, ending where the answer begins."""
    ids = TOKENIZER.encode_chat(ChatPrompt(messages=[{"role": "user", "content": "Hi there"}]))
    assert decode(ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
        "trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids.count(IM_START) == 3
    assert ids.count(IM_END) == 2
    assert ids == TOKENIZER.encode(decode(ids)), "as encoding the rendered text at once"


def test_text_too_long_is_refused_before_encoding() -> None:
    """What cannot fit even in the longest tokens is not encoded at all."""
    with pytest.raises(ContextLengthExceeded, match="8192"):
        TOKENIZER.encode("a" * (8192 * FILES.vocabulary.token_bytes_max + 1))


def test_no_template_is_the_clients_error() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        Tokenizer(replace(FILES, chat_template="")).encode_chat(ChatPrompt(messages=[{}]))


def changed(**changes: object) -> ModelFiles:
    assert FILES.bpe is not None
    return replace(FILES, bpe=replace(FILES.bpe, **changes))


@pytest.mark.parametrize(
    ("files", "what"),
    [
        (changed(pre="deepseek-llm"), "tokenizer.ggml.pre"),
        (changed(merges=["ab"]), "tokenizer.ggml.merges"),
        (changed(merges=["nope nada"]), "tokenizer.ggml.merges"),
        (replace(FILES, chat_template="{% if %}"), "chat template"),
    ],
)
def test_unusable_files_are_refused_by_name(files: ModelFiles, what: str) -> None:
    """An unknown pre-tokenizer is refused, not guessed; so is a broken template."""
    with pytest.raises(ModelFileError) as caught:
        Tokenizer(files)
    assert caught.value.what == what


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "ab 123's\n", ["ab", " 123", "'s", "\n"]),
        ("llama-bpe", "ab 12345'S\n", ["ab", " ", "123", "45", "'S", "\n"]),
        ("smollm", "ab 123's\n", ["ab", " ", "1", "2", "3", "'s", "\n"]),
    ],
)
def test_pre_tokenizers_cut_words(pre: str, text: str, pieces: list[str]) -> None:
    """With no merges at all, whole words are the only tokens of more than a byte."""
    alphabet = {byte: char for char, byte in byte_alphabet().items()}
    spelled = ["".join(alphabet[byte] for byte in piece.encode()) for piece in pieces]
    words = dict.fromkeys([*alphabet.values(), *spelled])
    files = changed(pre=pre, tokens=[*words], merges=[], control=frozenset(), user=frozenset())
    encoded = Tokenizer(files)._encoder.pre_tokenizer.pre_tokenize_str(text)
    assert [piece for piece, _ in encoded] == spelled


def directory_of(folder: Path) -> Path:
    """The default model's tokenizer as a Hugging Face directory."""
    TOKENIZER._encoder.save(str(folder / "tokenizer.json"))
    config = {"max_position_embeddings": 8192, "model_type": "llama", "eos_token_id": IM_END}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(FILES.chat_template)
    return folder


def test_hugging_face_directory(tmp_path: Path) -> None:
    """The same vocabulary written as tokenizer.json gives the same ids, chats included."""
    other = Tokenizer(read_model(directory_of(tmp_path)))
    for text in ("Hello world", "x 12 <|im_end|>", "naïve 日本"):
        assert other.encode(text) == TOKENIZER.encode(text)
    chat = ChatPrompt(messages=[{"role": "user", "content": "a <|im_end|> b"}])
    assert other.encode_chat(chat) == TOKENIZER.encode_chat(chat)


def test_broken_tokenizer_json_is_refused(tmp_path: Path) -> None:
    folder = directory_of(tmp_path)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"Sequence"', '"Nonsense"'))
    with pytest.raises(ModelFileError) as caught:
        Tokenizer(read_model(folder))
    assert caught.value.file == str(file)


@pytest.mark.parametrize("text", ["7" * 600_000, "\U000f0000" * 600_000, "a b " * 150_000])
def test_what_is_far_too_long_is_not_encoded_whole(text: str) -> None:
    """Encoding it would take seconds; windows show that it cannot fit."""
    with pytest.raises(ContextLengthExceeded, match=f"input of {len(text)} characters"):
        TOKENIZER.encode(text)
    chat = ChatPrompt(messages=[{"role": "user", "content": text}])
    with pytest.raises(ContextLengthExceeded, match="characters"):
        TOKENIZER.encode_chat(chat)


@pytest.mark.parametrize("piece", [" ", "=", "the ", "7"])
def test_windows_refuse_nothing_that_fits(piece: str) -> None:
    """Cutting a text adds ids, never so many that a text within the context is refused."""
    per_piece = len(TOKENIZER.encode(piece * 8000)) / 8000
    count = int(0.99 * FILES.max_model_len / per_piece)
    assert 0.9 < len(TOKENIZER.encode(piece * count)) / FILES.max_model_len <= 1
