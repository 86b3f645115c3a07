"""A SentencePiece model (`tokenizer.model`), read from its protocol buffer by field number.

Source: sentencepiece_model.proto. It has a handful of fields that decide how text is encoded; a
reader of a page instead of a dependency of every service.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from shared.gguf_file import ModelFileError
from shared.vocabulary import MAX_VOCABULARY, SpmParts, token_kinds

_BPE = 2  # trainer_spec.model_type
_OTHER_TYPES = {1: "Unigram", 3: "Word", 4: "Char"}
_CONTROL = 3  # pieces.type
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5  # how a field's value is written
_MAX_BYTES = 64 << 20  # Gemma's, the largest known, has 4 MB

T = TypeVar("T", int, bytes)
Fields = dict[int, int | bytes]


class SpmFile(NamedTuple):
    """A vocabulary and the ids of its special tokens; None = it has none."""

    parts: SpmParts
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None


class _Piece(NamedTuple):
    text: str
    score: float
    kind: int


def read_spm(file: Path) -> SpmFile:
    """The model in `file`. Raises `ModelFileError`: broken, not of type BPE, or normalized in a way
    that the families here are not.
    """
    try:
        size = file.stat().st_size
        raw = file.read_bytes() if size <= _MAX_BYTES else b""
    except OSError as error:
        raise ModelFileError(file, "file", str(error)) from error
    if size > _MAX_BYTES:
        raise ModelFileError(file, "file", f"{size} bytes are more than {_MAX_BYTES}")
    pieces: list[_Piece] = []
    trainer: Fields = {}
    normalizer: Fields = {}
    what = "model"
    try:
        for number, value in _fields(raw):
            if number == 1:
                what = f"piece {len(pieces)}"
                pieces.append(_piece(_message(value), len(pieces)))
            elif number == 2:
                what = "trainer_spec"
                trainer = _message(value)
            elif number == 3:
                what = "normalizer_spec"
                normalizer = _message(value)
        what = "trainer_spec"
        ids = [_control_id(trainer, pieces, *field) for field in ((41, 1), (42, 2), (43, -1))]
        _check(file, trainer, normalizer)
        what = "normalizer_spec"
        parts = _parts(pieces, normalizer)
    except ValueError as error:
        raise ModelFileError(file, what, str(error)) from error
    if problem := parts.problem():
        raise ModelFileError(file, f"pieces: {problem[0]}", problem[1])
    return SpmFile(parts, *ids)


def _check(file: Path, trainer: Fields, normalizer: Fields) -> None:
    kind = _get(trainer, 3, 1)
    if kind != _BPE:
        reason = f"{_OTHER_TYPES.get(kind, kind)} is not supported, only BPE is"
        raise ModelFileError(file, "trainer_spec.model_type", reason)
    if _get(trainer, 24, 0):
        reason = "a space after each word is not supported"
        raise ModelFileError(file, "trainer_spec.treat_whitespace_as_suffix", reason)
    if _get(normalizer, 2, b""):
        name = _get(normalizer, 1, b"").decode("utf-8", "replace")
        raise ModelFileError(file, "normalizer_spec.name", f"{name!r} is not supported")
    if not _get(normalizer, 5, 1):
        raise ModelFileError(file, "normalizer_spec.escape_whitespaces", "false is not supported")


def _control_id(trainer: Fields, pieces: list[_Piece], number: int, default: int) -> int | None:
    """The id that field `number` names; none is written as -1, which reads as a huge one."""
    token_id = _get(trainer, number, default)
    return token_id if 0 <= token_id < len(pieces) and pieces[token_id].kind == _CONTROL else None


def _piece(fields: Fields, number: int) -> _Piece:
    if number >= MAX_VOCABULARY:
        raise ValueError(f"more than {MAX_VOCABULARY} pieces")
    score = _get(fields, 2, bytes(4))
    if len(score) != 4:
        raise ValueError("the score is no float")
    return _Piece(
        text=_get(fields, 1, b"").decode(),
        score=struct.unpack("<f", score)[0],
        kind=_get(fields, 3, 1),
    )


def _parts(pieces: list[_Piece], normalizer: Fields) -> SpmParts:
    tokens = [piece.text for piece in pieces]
    return SpmParts(
        tokens=tokens,
        scores=[piece.score for piece in pieces],
        kinds=token_kinds(tokens, [piece.kind for piece in pieces]),
        space_prefix=bool(_get(normalizer, 3, 1)),
        single_spaces=bool(_get(normalizer, 4, 1)),
    )


def _get(fields: Fields, number: int, default: T) -> T:
    value = fields.get(number, default)
    if isinstance(value, type(default)):
        return value
    raise ValueError(f"field {number} is not of type {type(default).__name__}")


def _message(value: int | bytes) -> Fields:
    if isinstance(value, bytes):
        return dict(_fields(value))
    raise ValueError("is a number")


def _fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a message; what is not a varint is left as bytes."""
    at = 0
    while at < len(raw):
        key, at = _varint(raw, at)
        number, wire = key >> 3, key & 7
        size = {_FIXED32: 4, _FIXED64: 8}.get(wire, 0)
        if wire in (_VARINT, _LENGTH):
            size, at = _varint(raw, at)
        elif not size:
            raise ValueError(f"field {number} is written in the unknown way {wire}")
        if wire == _VARINT:
            yield number, size
            continue
        if size > len(raw) - at:
            raise ValueError(
                f"truncated: field {number} has {size} bytes, {len(raw) - at} are left"
            )
        yield number, raw[at : at + size]
        at += size


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place, byte in enumerate(raw[at : at + 10]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError("truncated: a number does not end")
