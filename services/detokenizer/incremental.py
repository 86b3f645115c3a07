"""Ids of one leg to text, one id at a time: safe for split characters and for stop strings.

The text released after id i is a function of the ids up to i alone, never of how they were batched.
"""

import codecs
from collections.abc import Iterable
from typing import NamedTuple

from shared.messages import End
from shared.model_files import Vocabulary
from shared.sampling import TextParams

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Match(NamedTuple):
    """Where a stop string stands in the held text."""

    start: int
    end: int
    stop: str


class TextStream:
    """The text of one leg.

    `push` takes one id and returns the text it releases; once `stop_string` is set the leg is over
    and takes no more. `prompt_tail` are the last ids of the prompt: when they end inside a
    character, the first output completes it and the whole character is output. A space at the
    beginning is text, unless these ids have none and the vocabulary strips it from a whole text.
    """

    def __init__(
        self, vocabulary: Vocabulary, params: TextParams, prompt_tail: Iterable[int] = ()
    ) -> None:
        self.num_ids = 0
        self.stop_string: str | None = None
        self._vocabulary = vocabulary
        self._params = params
        self._stops = tuple(filter(None, params.stop))
        self._decoder = _UTF8(vocabulary.on_error)
        skipped = vocabulary.special if params.skip_special_tokens else frozenset[int]()
        prompt = b"".join(vocabulary.raw(i) for i in prompt_tail if i not in skipped)
        self._prompt_bytes = _open_bytes(prompt)
        self._strips_space = vocabulary.strips_space and not prompt
        self._held = ""  # a proper prefix of a stop string, not yet released

    def push(self, token_id: int, end: End = "") -> str:
        """Text released by this id. With `end` it is the last one and nothing stays held.

        An id that ends the leg (`end` "stop") is not part of the text, unless `include_stop_str`;
        it may complete a stop string, though, which then counts first.
        """
        assert self.stop_string is None
        self.num_ids += 1
        params, vocabulary = self._params, self._vocabulary
        counts = self.num_ids >= params.min_tokens
        before = self._held
        if params.skip_special_tokens and token_id in vocabulary.special:
            new, name = "", vocabulary.text_of(token_id)
            if counts and name in self._stops:  # a stop string that is a control token
                self.stop_string = name
                return self._finish(before) + (name if params.include_stop_str else "")
        else:
            undecoded = self._decoder.getstate()
            new = self._decode(vocabulary.raw(token_id))
            match = self._find(before, new) if counts else None
            if match is not None:
                self.stop_string = match.stop
                self._held = ""
                return (before + new)[: match.end if params.include_stop_str else match.start]
            if end == "stop" and not params.include_stop_str:
                self._decoder.setstate(undecoded)
                new = ""
        text = before + new
        if end:
            return self._finish(text)
        keep = self._held_length(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What is still held when the leg ends without a further id."""
        return self._finish(self._held)

    def _finish(self, text: str) -> str:
        self._held = ""
        return text + self._decoder.decode(b"", final=True)

    def _decode(self, raw: bytes) -> str:
        if raw and self._strips_space:
            self._strips_space = False
            raw = raw.removeprefix(b" ")
        if raw and self._prompt_bytes:
            opened, self._prompt_bytes = self._prompt_bytes, b""
            if _continues(opened, raw[0]):
                raw = opened + raw
        return self._decoder.decode(raw)

    def _find(self, held: str, new: str) -> Match | None:
        """The stop string that `new` completes first; of two that end together the longer."""
        text = held + new
        best: Match | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, len(held) - len(stop) + 1))
            if start < 0:
                continue
            match = Match(start, start + len(stop), stop)
            if best is None or (match.end, match.start) < (best.end, best.start):
                best = match
        return best

    def _held_length(self, text: str) -> int:
        """The longest suffix of `text` that is a proper prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


def _open_bytes(raw: bytes) -> bytes:
    """The bytes at the end of `raw` that begin a character and do not complete it."""
    decoder = _UTF8("replace")
    decoder.decode(raw)
    return decoder.getstate()[0]


def _continues(opened: bytes, byte: int) -> bool:
    """Whether `byte` goes on with the character that `opened` begins."""
    try:
        _UTF8("strict").decode(opened + bytes([byte]))
    except UnicodeDecodeError:
        return False
    return True
