"""Text of a leg with a SentencePiece vocabulary: spaces, bytes, and `transformers` as the judge."""

from dataclasses import dataclass

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from services.detokenizer.incremental import TextStream
from shared.model_files import SpmParts, Vocabulary
from shared.sampling import TextParams
from shared.vocabulary import token_kinds

BOS, EOS = 1, 2
BYTE_0 = 3  # <0x00>
FIRST_PIECE = BYTE_0 + 256


@dataclass
class Model:
    """A vocabulary as we read it, and the decoder that its tokenizer.json would have."""

    vocabulary: Vocabulary
    reference: tokenizers.Tokenizer

    def decode(self, ids: list[int], skip: bool) -> str:
        text: str = self.reference.decode(ids, skip_special_tokens=skip)
        return text


def model(pieces: list[str], space_prefix: bool) -> Model:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, 3, 3, *([6] * 256), *([1] * len(pieces))]
    parts = SpmParts(
        tokens, [0.0] * len(tokens), token_kinds(tokens, types), space_prefix=space_prefix
    )
    assert parts.problem() is None
    vocab = {token: i for i, token in enumerate(tokens)}
    reference = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    reference.decoder = decoders.Sequence([*steps, *strip])
    reference.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return Model(parts.vocabulary([EOS]), reference)


PIECES = ["\u2581", "\u2581Hello", "\u2581world", "ly", "é", "\u2581\u2581\u2581", "日"]
LLAMA, GEMMA = model(PIECES, True), model(PIECES, False)
SPACE, HELLO, WORLD, LY, E_ACUTE, SPACES, SUN = range(FIRST_PIECE, FIRST_PIECE + len(PIECES))


def as_bytes(text: str) -> list[int]:
    return [BYTE_0 + byte for byte in text.encode()]


def pieces_of(
    which: Model, prompt: list[int], ids: list[int], **params: object
) -> tuple[list[str], str | None]:
    """What each id releases, with what is left at the end; and the stop string found."""
    stream = TextStream(which.vocabulary, TextParams(**params), prompt)  # type: ignore[arg-type]
    released = []
    for token_id in ids:
        released.append(stream.push(token_id))
        if stream.stop_string is not None:
            return released, stream.stop_string
    return [*released, stream.finish()], None


@pytest.mark.parametrize(
    ("prompt", "ids", "released"),
    [
        ([BOS, HELLO], [WORLD, LY], [" world", "ly"]),
        ([BOS, HELLO], [SPACES, WORLD], ["   ", " world"]),
        ([BOS, HELLO, SPACE], [HELLO], [" Hello"]),
        ([HELLO, EOS], [HELLO], [" Hello"]),
        ([BOS], [HELLO, WORLD], ["Hello", " world"]),
        ([BOS], [SPACES, HELLO], ["  ", " Hello"]),
        ([BOS], [BOS, SPACE, HELLO], ["", "", " Hello"]),
        ([], [HELLO], ["Hello"]),
        ([BOS], [LY, WORLD], ["ly", " world"]),
    ],
)
def test_only_the_first_space_of_a_whole_text_goes(
    prompt: list[int], ids: list[int], released: list[str]
) -> None:
    """An answer that follows text keeps its space; where the prompt has no text, the answer is the
    whole, and the space that the encoder puts before a text is none of it.
    """
    assert pieces_of(LLAMA, prompt, ids)[0] == [*released, ""]


def test_control_tokens_that_are_shown_are_text_before_it() -> None:
    released, _ = pieces_of(LLAMA, [BOS], [HELLO], skip_special_tokens=False)
    assert released == [" Hello", ""]
    released, _ = pieces_of(LLAMA, [], [BOS, HELLO], skip_special_tokens=False)
    assert released == ["<s>", " Hello", ""]


def test_without_a_space_prefix_every_space_is_text() -> None:
    """Gemma: the encoder puts no space before a text, so none goes."""
    assert pieces_of(GEMMA, [BOS], [HELLO])[0] == [" Hello", ""]
    assert GEMMA.vocabulary.text([BOS, HELLO], skip_special_tokens=True) == " Hello"


def test_bytes_join_to_characters_across_ids() -> None:
    """And across control tokens that are not shown; what never joins shows as U+FFFD each."""
    assert pieces_of(LLAMA, [HELLO], as_bytes("é😀"))[0] == ["", "é", "", "", "", "😀", ""]
    first, *rest = as_bytes("日")
    assert pieces_of(LLAMA, [HELLO], [first, BOS, *rest])[0] == ["", "", "", "日", ""]
    assert pieces_of(LLAMA, [HELLO], [first, rest[0], LY])[0] == ["", "", "\ufffd\ufffdly", ""]
    assert pieces_of(LLAMA, [HELLO], [first, rest[0]])[0] == ["", "", "\ufffd\ufffd"]


def test_an_answer_completes_the_prompts_character() -> None:
    first, *rest = as_bytes("日")
    assert pieces_of(LLAMA, [HELLO, first], [*rest, WORLD])[0] == ["", "日", " world", ""]


def test_stop_strings_see_the_text_that_is_shown() -> None:
    """A space that is stripped is nothing that a stop string could match."""
    assert pieces_of(LLAMA, [BOS], [HELLO, WORLD], stop=(" Hello",)) == (
        ["Hello", " world", ""],
        None,
    )
    assert pieces_of(LLAMA, [HELLO], [HELLO], stop=(" Hello",)) == ([""], " Hello")
    stop = ("o w",)
    assert pieces_of(LLAMA, [BOS], [HELLO, WORLD], stop=stop) == (["Hell", ""], "o w")
    assert pieces_of(LLAMA, [HELLO], as_bytes("日x"), stop=("日x",)) == (["", "", "", ""], "日x")


pieces = st.text("\u2581ab日é", min_size=1, max_size=4)
models_ = st.builds(model, st.lists(pieces, max_size=8, unique=True), st.booleans())


@st.composite
def legs(draw: st.DrawFn) -> tuple[Model, list[int]]:
    which = draw(models_)
    some = st.one_of(
        st.integers(0, which.vocabulary.size - 1).map(lambda i: [i]),
        st.integers(FIRST_PIECE, max(FIRST_PIECE, which.vocabulary.size - 1)).map(lambda i: [i]),
        st.text("a é日😀", max_size=2).map(as_bytes),
        st.just([BOS]),
    )
    ids = [i for part in draw(st.lists(some, max_size=10)) for i in part]
    return which, [i for i in ids if i < which.vocabulary.size]


@settings(max_examples=200, deadline=None)
@given(legs(), st.booleans(), st.data())
def test_an_answer_is_the_whole_less_its_prompt(
    leg: tuple[Model, list[int]], skip: bool, data: st.DataObject
) -> None:
    """Wherever the prompt ends, its text and the answer's are those of `transformers` together.

    (Where bytes are no character its text of the whole takes back the text of the beginning.)
    """
    which, ids = leg
    whole = which.decode(ids, skip)
    assert ("\ufffd" in whole) == ("\ufffd" in which.vocabulary.text(ids, skip))
    if "\ufffd" in whole:
        return
    assert which.vocabulary.text(ids, skip) == whole
    cut = data.draw(st.integers(0, len(ids)))
    prompt = which.vocabulary.text(ids[:cut], skip).rstrip("\ufffd")  # a character is the answer's
    tail = ids[max(0, cut - 8) : cut]  # what a leg's context carries
    assume(prompt == "" or not skip or any(i not in which.vocabulary.special for i in tail))
    released, _ = pieces_of(which, tail, ids[cut:], skip_special_tokens=skip)
    assert prompt + "".join(released) == whole


@settings(max_examples=100, deadline=None)
@given(legs(), st.booleans())
def test_a_leg_without_prompt_text_is_the_whole_text(
    leg: tuple[Model, list[int]], skip: bool
) -> None:
    """Broken bytes included: piece by piece or at once, the text is one."""
    which, ids = leg
    released, _ = pieces_of(which, [], ids, skip_special_tokens=skip)
    assert "".join(released) == which.vocabulary.text(ids, skip)
