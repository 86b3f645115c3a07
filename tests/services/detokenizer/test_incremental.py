"""Text of one leg: compared with decoding the whole at once, for random vocabularies and stops."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.detokenizer.incremental import TextStream
from shared.messages import End
from shared.model_files import Vocabulary
from shared.sampling import TextParams

BYTES = [bytes([value]) for value in range(256)]
# Ids 0..255 are the bytes themselves; after them a few words and two control tokens.
WORDS = [b"Hello", b" world", "€".encode(), "né".encode(), b"\xf0\x9f", b"</s", b"<end>", b"<eos>"]
VOCABULARY = Vocabulary([*BYTES, *WORDS], special={262, 263}, end_ids={263})
EURO, END, EOS = 258, 262, 263


def stream(tail: bytes = b"", **params: object) -> TextStream:
    return TextStream(VOCABULARY, TextParams(**params), list(tail))  # type: ignore[arg-type]


def feed(text: TextStream, ids: list[int] | bytes, end: End = "") -> list[str]:
    """What each id releases; `end` goes with the last one."""
    pieces: list[str] = []
    for number, token_id in enumerate(ids):
        pieces.append(text.push(token_id, end if number == len(ids) - 1 else ""))
        if text.stop_string is not None:
            break
    return pieces


def test_character_split_over_ids_is_held_back() -> None:
    """No half character is ever shown."""
    assert feed(stream(), "a€b".encode()) == ["a", "", "", "€", "b"]


@pytest.mark.parametrize("broken", [b"\xe2\x82", b"\xf0\x9f\x98", b"a\xc3"])
def test_bytes_that_never_complete_are_one_replacement(broken: bytes) -> None:
    """At the end, the rest of a character is one U+FFFD and no error."""
    assert "".join(feed(stream(), broken, "length")) == broken.decode("utf-8", "replace")


def test_stop_string_across_ids_never_leaks() -> None:
    """A stop string that comes in pieces is not shown in pieces; the text after it is dropped."""
    text = stream(stop=("lo wor",))
    assert feed(text, [256, 257, 33]) == ["Hel", ""]
    assert text.stop_string == "lo wor"
    assert text.num_ids == 2


def test_only_a_proper_prefix_is_held_back() -> None:
    """Text that cannot become a stop string any more is released at once."""
    text = stream(stop=("abc", "bX"))
    assert feed(text, b"zabd") == ["z", "", "", "abd"]
    assert feed(text, b"ab") == ["", ""]
    assert text.finish() == "ab"


def test_stop_string_included_on_request() -> None:
    text = stream(stop=(" wo",), include_stop_str=True)
    assert feed(text, [256, 257]) == ["Hello", " wo"]


def test_first_to_end_wins_of_several_stops() -> None:
    """However ids are cut, the stop string that completes first ends the text."""
    for ids in ([*b"Hello"], [256]):
        text = stream(stop=("ello", "el"))
        assert "".join(feed(text, ids)) == "H"
        assert text.stop_string == "el"


def test_longer_of_two_that_end_together() -> None:
    text = stream(stop=("lo", "llo"))
    assert "".join(feed(text, [256])) == "He"
    assert text.stop_string == "llo"


def test_stop_strings_before_min_tokens_are_text() -> None:
    """Only a stop string completed by id number `min_tokens` or a later one counts."""
    text = stream(stop=("b",), min_tokens=4)
    assert "".join(feed(text, b"ababab")) == "aba"
    assert text.num_ids == 4


def test_end_id_is_not_text() -> None:
    """An id that ends the leg shows only with `include_stop_str`, even an ordinary one."""
    assert "".join(feed(stream(), [256, 33], "stop")) == "Hello"
    assert "".join(feed(stream(include_stop_str=True), [256, 33], "stop")) == "Hello!"
    assert "".join(feed(stream(skip_special_tokens=False), [256, EOS], "stop")) == "Hello"


def test_stop_string_beats_end_id_and_length() -> None:
    """At the same id, a stop string is the reason."""
    for end in ("stop", "length"):
        text = stream(stop=("world",))
        assert "".join(feed(text, [256, 257], end)) == "Hello "
        assert text.stop_string == "world"


@pytest.mark.parametrize("skip", [True, False])
def test_stop_string_may_be_a_control_token(skip: bool) -> None:
    """The text of a control token ends the leg, whether or not such tokens are shown."""
    text = stream(stop=("<end>",), skip_special_tokens=skip)
    assert "".join(feed(text, [256, END, 256])) == "Hello"
    assert text.stop_string == "<end>"


def test_control_tokens_are_skipped_or_shown() -> None:
    assert "".join(feed(stream(), [256, END, 257])) == "Hello world"
    assert "".join(feed(stream(skip_special_tokens=False), [END, 33])) == "<end>!"


def test_held_text_is_released_at_the_end() -> None:
    """What looked like the start of a stop string is text when the leg ends for another reason."""
    assert feed(stream(stop=("lo!",)), [256], "length") == ["Hello"]
    assert feed(stream(stop=("lo!",)), [256, EOS], "stop") == ["Hel", "lo"]


def test_prompt_that_ends_inside_a_character() -> None:
    """The output completes the character and shows it whole; nothing else of the prompt returns."""
    euro = "€".encode()
    assert feed(stream(b"price: " + euro[:1]), euro[1:]) == ["", "€"]
    assert feed(stream(b"price: " + euro[:2]), [256]) == ["Hello"]
    assert feed(stream(euro[:2]), [EOS], "stop") == [""]
    assert feed(stream(b"ok"), b"!") == ["!"]
    assert feed(stream(b"\xef\xbf"), b"\xbd") == ["\ufffd"]


def test_ids_outside_the_vocabulary_are_no_text() -> None:
    """A padded row of the logits may name an id that has no token."""
    assert feed(stream(), [9999, 256]) == ["", "Hello"]


tokens = st.one_of(
    st.binary(min_size=1, max_size=4),
    st.text("ab€é😀<", min_size=1, max_size=3).map(str.encode),
)
vocabularies = st.lists(tokens, min_size=1, max_size=12).flatmap(
    lambda tokens: st.sets(st.integers(0, len(tokens) - 1), max_size=2).map(
        lambda special: Vocabulary(tokens, special)
    )
)
stops = st.lists(st.text("ab€é😀<", min_size=1, max_size=4), max_size=3).map(tuple)


@st.composite
def legs(draw: st.DrawFn) -> tuple[Vocabulary, list[int]]:
    vocabulary = draw(vocabularies)
    return vocabulary, draw(st.lists(st.integers(0, vocabulary.size - 1), max_size=24))


@settings(max_examples=300, deadline=None)
@given(legs(), st.booleans())
def test_without_stops_it_is_the_whole_decoded(
    leg: tuple[Vocabulary, list[int]], skip: bool
) -> None:
    """Piece by piece gives exactly what decoding all bytes at once gives, U+FFFD included."""
    vocabulary, ids = leg
    text = TextStream(vocabulary, TextParams(skip_special_tokens=skip))
    shown = "".join(text.push(token_id) for token_id in ids) + text.finish()
    assert shown == vocabulary.text(ids, skip)


def reference(vocabulary: Vocabulary, ids: list[int], params: TextParams) -> tuple[str, int, str]:
    """Text, number of ids and stop string, from the whole text after each id: slow and obvious."""
    done = ""
    for count in range(1, len(ids) + 1):
        raw = b"".join(vocabulary.raw(i) for i in ids[:count])
        now = closed(raw).decode("utf-8", "replace")
        if count >= params.min_tokens:
            ends = [
                (end, -len(stop), stop)
                for stop in params.stop
                for end in range(len(done) + 1, len(now) + 1)
                if now[:end].endswith(stop)
            ]
            if ends:
                end, size, stop = min(ends)
                return now[: end if params.include_stop_str else end + size], count, stop
        done = now
    return vocabulary.text(ids, False), len(ids), ""


def closed(raw: bytes) -> bytes:
    """`raw` without the bytes at its end that may yet become a character."""
    for size in range(1, min(3, len(raw)) + 1):
        tail = raw[-size:]
        for second in (b"", b"\x80", b"\x8f", b"\x90", b"\xa0"):  # what may follow
            for rest in range(3):
                try:
                    character = (tail + second + b"\x80" * rest).decode()
                except UnicodeDecodeError:
                    continue
                if len(character) == 1 and second + b"\x80" * rest:
                    return raw[:-size]
    return raw


@settings(max_examples=500, deadline=None)
@given(legs(), stops, st.booleans(), st.integers(0, 5))
def test_stops_agree_with_the_slow_reference(
    leg: tuple[Vocabulary, list[int]], stop: tuple[str, ...], include: bool, min_tokens: int
) -> None:
    """Text, finishing id and stop string are those of a search in the whole text after each id."""
    vocabulary, ids = leg
    params = TextParams(
        stop=stop, include_stop_str=include, min_tokens=min_tokens, skip_special_tokens=False
    )
    text = TextStream(vocabulary, params)
    shown = ""
    for token_id in ids:
        shown += text.push(token_id)
        if text.stop_string is not None:
            break
    else:
        shown += text.finish()
    assert (shown, text.num_ids, text.stop_string or "") == reference(vocabulary, ids, params)


@settings(max_examples=300, deadline=None)
@given(legs(), stops, st.data())
def test_a_resumed_leg_continues_the_same_text(
    leg: tuple[Vocabulary, list[int]], stop: tuple[str, ...], data: st.DataObject
) -> None:
    """Replaying the ids so far gives the same state: what follows is released the same way."""
    vocabulary, ids = leg
    params = TextParams(stop=stop)
    first = TextStream(vocabulary, params)
    pieces = []
    for token_id in ids:
        pieces.append(first.push(token_id))
        if first.stop_string is not None:
            break
    cut = data.draw(st.integers(0, max(0, len(pieces) - 1)))
    second = TextStream(vocabulary, params)
    assert [second.push(token_id) for token_id in ids[:cut]] == pieces[:cut]
    assert [second.push(token_id) for token_id in ids[cut : len(pieces)]] == pieces[cut:]
    assert second.stop_string == first.stop_string


@settings(max_examples=300, deadline=None)
@given(st.text("a€é😀", max_size=4), st.integers(0, 3), st.text("a€é😀\ufffd", max_size=4))
def test_any_cut_between_prompt_and_output(prompt: str, cut: int, output: str) -> None:
    """Wherever the prompt ends, prompt and output together read as the whole."""
    raw = (prompt + output).encode()
    at = max(0, len(prompt.encode()) - cut)
    head = closed(raw[:at]).decode("utf-8", "replace")
    text = TextStream(VOCABULARY, TextParams(), list(raw[:at][-8:]))
    shown = "".join(text.push(byte) for byte in raw[at:]) + text.finish()
    if raw[at:]:
        assert head + shown == prompt + output
    else:
        assert shown == ""
