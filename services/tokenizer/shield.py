"""User text that cannot turn into control tokens, whatever a chat template puts around it. Pure.

A template mixes its own control tokens and the user's words into one string, and afterwards nobody
can tell them apart. So before rendering, characters of the user's strings that could take part in a
control token are replaced one for one by private code points that nothing else in this request
uses. Control tokens are then looked for in the rendered text, and the pieces between them are
revealed. One for one: templates may trim, split, measure and join as they like.

What could take part: the first character of a control token written out; a first or last character
(whitespace aside) where the string could complete a token that begins before it or begin one that
ends after it. What a template cuts out of the middle of a string is not an edge of that string:
templates are trusted not to be written for that.
"""

import re
from collections.abc import Collection, Iterator
from typing import Any

from shared.errors import InvalidRequest

_PLANES = range(0xF0000, 0x10FFFE)  # the private planes 15 and 16
_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


class ControlTexts:
    """The texts of a model's control tokens (none empty), prepared once."""

    def __init__(self, texts: Collection[str]) -> None:
        self.texts = frozenset(texts)
        escaped = sorted(map(re.escape, self.texts), key=len, reverse=True)  # longest first
        any_of = "|".join(escaped) or "(?!)"
        self._whole = re.compile(f"({any_of})")
        self._starts = re.compile(f"(?={any_of})")
        self._begins = {text[:size] for text in texts for size in range(1, len(text))}
        self._ends = {text[size:] for text in texts for size in range(1, len(text))}
        self._longest = max(map(len, self.texts), default=0)
        self.alphabet = sorted(set().union(*self.texts))

    def split(self, text: str) -> list[str]:
        """`text` cut at its control tokens; every second piece is one."""
        return self._whole.split(text)

    def risks(self, text: str) -> set[int]:
        """Places in `text` without whose characters it has no part in a control token."""
        places = {match.start() for match in self._starts.finditer(text)}
        stripped = text.strip()
        return places | self._edges(text, 0) | self._edges(stripped, text.find(stripped))

    def _edges(self, text: str, offset: int) -> set[int]:
        """The first and last place of `text`, where a token could reach over them."""
        places: set[int] = set()
        sizes = range(1, min(self._longest, len(text) + 1))
        inside = 0 < len(text) < self._longest and any(text in token for token in self.texts)
        if inside or any(text[:size] in self._ends for size in sizes):
            places.add(offset)
        if any(text[-size:] in self._begins for size in sizes):
            places.add(offset + len(text) - 1)
        return places


class Shield:
    """Hides and reveals the strings of one request; `seen` = all that may be rendered.

    `mark` is one more private character, for whoever needs to find a place in the rendered text.
    """

    def __init__(self, control: ControlTexts, seen: Any) -> None:
        base = _free_range(len(control.alphabet) + 1, seen)
        self.mark = chr(base)
        self._control = control
        self._hidden = {char: chr(base + n) for n, char in enumerate(control.alphabet, start=1)}
        self._revealed: dict[int, str | None] = {ord(self.mark): None}
        self._revealed |= {ord(hidden): char for char, hidden in self._hidden.items()}

    def messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """`messages` hidden; known roles stay what the template compares them with."""
        return [
            {
                self._value(key, False): value
                if key == "role" and value in _ROLES
                else self._value(value, key != "type")
                for key, value in message.items()
            }
            for message in messages
        ]

    def data(self, value: Any) -> Any:
        """Any other value of the request hidden; plain words are left, templates compare them."""
        return self._value(value, False)

    def reveal(self, rendered: str) -> str:
        return rendered.translate(self._revealed)

    def _value(self, value: Any, words: bool) -> Any:
        match value:
            case str():
                return value if not words and value.isidentifier() else self._text(value)
            case dict():
                return {
                    self._value(key, False): self._value(item, words and key != "type")
                    for key, item in value.items()
                }
            case list():
                return [self._value(item, words) for item in value]
        return value

    def _text(self, text: str) -> str:
        places = self._control.risks(text)
        if not places:
            return text
        chars = list(text)
        for place in places:
            chars[place] = self._hidden[chars[place]]
        return "".join(chars)


def _free_range(size: int, seen: Any) -> int:
    """The first of `size` private code points in a row that no string in `seen` uses."""
    used: set[int] = set()
    for text in _strings(seen):
        used.update(map(ord, _PRIVATE.findall(text)))
    for base in range(_PLANES.start, _PLANES.stop - size, size):
        if used.isdisjoint(range(base, base + size)):
            return base
    raise InvalidRequest("the messages use too many private characters", param="messages")


def _strings(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for key, item in value.items():
                yield from _strings(key)
                yield from _strings(item)
        case list() | tuple():
            for item in value:
                yield from _strings(item)
