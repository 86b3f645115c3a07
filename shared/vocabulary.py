"""Every id's bytes, and the two kinds of vocabulary that model files hold."""

import codecs
import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct

SPACE = "\u2581"  # how SentencePiece writes a space
MAX_VOCABULARY = 1 << 22
_MAX_PIECE = 256  # characters; a piece is cut everywhere to find the merges that make it


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("each_byte", _each_byte)


class Vocabulary:
    """Every id's raw bytes. `special` ids are control tokens, `end_ids` those that end an answer.

    Ids outside 0..size-1 (a padded logit row can name one) have no bytes. `sentencepiece` = bytes
    that are no character show as U+FFFD each, as SentencePiece shows them; else as many as can
    begin one character show as one. `strips_space` = the space that a whole text begins with was
    put there by the encoder.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        special: Iterable[int] = (),
        end_ids: Iterable[int] = (),
        *,
        sentencepiece: bool = False,
        strips_space: bool = False,
    ) -> None:
        self.tokens = tuple(tokens)
        self.size = len(self.tokens)
        self.special = frozenset(special)
        self.end_ids = frozenset(end_ids)
        self.token_bytes_max = max(map(len, self.tokens), default=0)
        self.on_error = "each_byte" if sentencepiece else "replace"
        self.strips_space = strips_space

    def raw(self, token_id: int) -> bytes:
        """The bytes of one id; b"" outside the vocabulary."""
        return self.tokens[token_id] if 0 <= token_id < self.size else b""

    def text_of(self, token_id: int) -> str:
        """One id alone as text; bytes that are no character show as U+FFFD."""
        return self.raw(token_id).decode("utf-8", self.on_error)

    def text(self, ids: Iterable[int], skip_special_tokens: bool) -> str:
        """The text of a whole sequence of ids."""
        skipped = self.special if skip_special_tokens else frozenset[int]()
        raw = b"".join(self.raw(i) for i in ids if i not in skipped)
        return raw.removeprefix(b" " * self.strips_space).decode("utf-8", self.on_error)


class BpeParts(Struct, frozen=True):
    """A byte-level BPE as a GGUF file holds it; `tokens` in the byte-to-character alphabet."""

    pre: str  # the pre-tokenizer's name
    tokens: list[str]
    merges: list[str]  # "left right"
    control: frozenset[int]  # never matched in a user's text
    user: frozenset[int]  # whole tokens that are matched in any text


class TokenKinds(NamedTuple):
    """Ids by what SentencePiece and GGUF say of them; all others are normal."""

    control: frozenset[int]  # never matched in a user's text; the unknown token is one
    user: frozenset[int]  # whole tokens that are matched in any text
    unused: frozenset[int]
    byte: frozenset[int]
    unknown: int | None


def token_kinds(tokens: Sequence[str], types: Sequence[int]) -> TokenKinds:
    """Tokens sorted by type: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte."""
    ids: dict[int, set[int]] = {kind: set() for kind in range(2, 7)}
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        kind = 3 if kind == 4 and _looks_like_control(token) else kind
        if kind in ids:
            ids[kind].add(i)
    unknown, control, user, unused, byte = map(frozenset, ids.values())
    return TokenKinds(unknown | control, user, unused, byte, min(unknown, default=None))


def _looks_like_control(token: str) -> bool:
    """Whether a token that a file calls user-defined is one that only a template may write.

    Old converters called `<|end|>` and the like so; llama.cpp overrides them as well.
    """
    if token in ("<start_of_turn>", "<end_of_turn>"):
        return True
    return len(token) > 4 and token.startswith("<|") and token.endswith("|>")


class SpmParts(Struct, frozen=True):
    """A SentencePiece vocabulary of type BPE; `tokens` with U+2581 for spaces, "" = no token."""

    tokens: list[str]
    scores: list[float]  # the higher, the earlier a piece is merged
    kinds: TokenKinds
    space_prefix: bool = True  # a text is encoded with a space before it
    single_spaces: bool = False  # spaces at the ends are dropped, of several one stays
    eats_left: frozenset[int] = frozenset()  # whole tokens that take along the space before them
    eats_right: frozenset[int] = frozenset()  # and after them

    def problem(self) -> tuple[str, str] | None:
        """Which list (tokens, scores, token_type) no encoder can be made from, and why."""
        if not 0 < len(self.tokens) <= MAX_VOCABULARY:
            return "tokens", f"{len(self.tokens)} of them, not 1 to {MAX_VOCABULARY}"
        if len(self.scores) != len(self.tokens):
            return "scores", f"{len(self.scores)} entries for {len(self.tokens)} tokens"
        if not all(map(math.isfinite, self.scores)):
            return "scores", "not all are finite"
        seen: set[str] = set()
        for i, token in enumerate(self.tokens):
            if token in seen:
                return "tokens", f"{token!r} is there twice"
            if len(token) > _MAX_PIECE:
                return "tokens", f"token {i} has more than {_MAX_PIECE} characters"
            if i in self.kinds.byte and byte_of(token) is None:
                return "token_type", f"{token!r} is no byte"
            if token:
                seen.add(token)
        if len(self.kinds.byte) not in (0, 256):
            return "token_type", f"{len(self.kinds.byte)} byte tokens, not 256 or none"
        return None

    def vocabulary(self, end_ids: Iterable[int]) -> Vocabulary:
        """What the pieces spell."""
        control, byte = self.kinds.control, self.kinds.byte
        raw = [
            token.encode() if i in control else piece_bytes(token, i in byte)
            for i, token in enumerate(self.tokens)
        ]
        return Vocabulary(raw, control, end_ids, sentencepiece=True, strips_space=self.space_prefix)


# What ends an answer whatever the file's eos says (the set llama.cpp treats so).
_END_TOKENS = frozenset(
    {
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|end_of_text|>",
        "<end_of_turn>",
    }
)


def ends_of(tokens: Sequence[str], control: Collection[int]) -> set[int]:
    """Control tokens that end an answer by their very name."""
    return {i for i in control if tokens[i] in _END_TOKENS}


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of the byte-level BPE alphabet (GPT-2's `bytes_to_unicode`, inverted)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): b for n, b in enumerate(hidden)}


_BYTES = byte_alphabet()
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def byte_level(token: str) -> bytes:
    """Raw bytes of a token in the byte alphabet; a token written plainly is its own UTF-8."""
    try:
        return bytes([_BYTES[char] for char in token])
    except KeyError:
        return token.encode()


def byte_of(token: str) -> bytes | None:
    """The byte that `<0xNN>` names."""
    named = _BYTE.fullmatch(token)
    return bytes.fromhex(named[1]) if named else None


def piece_bytes(token: str, may_be_byte: bool = True) -> bytes:
    """Raw bytes of a SentencePiece token: U+2581 is a space, `<0xNN>` is a byte."""
    byte = byte_of(token) if may_be_byte else None
    return token.replace(SPACE, " ").encode() if byte is None else byte
