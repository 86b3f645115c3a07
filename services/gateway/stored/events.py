"""What the log of a stored request says, in the order in which it happens.

Events are facts; a reader that knows them all knows the request. Evolution is append-only, as on
the wire (`shared.messages`): `tests/services/gateway/stored/test_events.py` holds golden bytes.
"""

import msgspec
from msgspec import Struct

from services.gateway.events import Delta, SessionEnd
from shared.errors import ERRORS, MeshError
from shared.ids import pack_ids, unpack_ids
from shared.messages import PromptToken, Tokenized, TokenText


class Fact(Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True, gc=False):
    """Root of every event."""


class Submitted(Fact, frozen=True, kw_only=True):
    """First in every log: what was asked, by whom. Appended by the gateway that took it.

    `body` is what the client sent, JSON or MessagePack, without any key of the client's.
    """

    tenant: str
    endpoint: str
    body: bytes
    created: float  # seconds since 1970
    timeout_s: float


class Adopted(Fact, frozen=True, kw_only=True):
    """`gateway` runs the request from what the log says, and nobody else does: whoever did so
    before is refused from here on. Epochs of its legs begin at the sequence of this event << 20.
    """

    gateway: str


class Opened(Fact, frozen=True, kw_only=True):
    """Once: all that the request's legs need and that is neither in the body nor in their ids."""

    tokenized: Tokenized
    seed: int
    max_model_len: int


class Piece(Struct, frozen=True, array_like=True, gc=False):
    """New ids of one choice."""

    choice: int
    index: int  # of the first id
    ids: bytes  # packed
    text: str
    finish_reason: str = ""
    stop_reason: str | int | None = None
    logprobs: list[TokenText] | None = None
    prompt_logprobs: list[PromptToken] | None = None


class Output(Fact, frozen=True, kw_only=True):
    """What was generated since the last event, at most one piece per choice."""

    pieces: list[Piece]


class CancelRequested(Fact, frozen=True, kw_only=True):
    """The client wants it to end. Whoever runs it appends `Ended`."""


class Ended(Fact, frozen=True, kw_only=True):
    """Last in every log. `code` "" = every choice finished, else an error's code."""

    code: str = ""
    detail: str = ""
    param: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


Event = Submitted | Adopted | Opened | Output | CancelRequested | Ended
Shown = Submitted | Adopted | Delta | SessionEnd
"""What an answer is written from. Of a request that is not stored: the last two."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Event)


def encode_event(event: Event) -> bytes:
    """The bytes of an event in its log."""
    return _encoder.encode(event)


def decode_event(payload: bytes) -> Event:
    """Raises `MeshError` for what this version cannot read."""
    try:
        return _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise MeshError(f"The log holds what cannot be read: {error}.") from error


def piece_of(delta: Delta) -> Piece:
    """What a session delivered, as it is logged."""
    return Piece(
        delta.choice,
        delta.index,
        pack_ids(delta.ids),
        delta.text,
        delta.finish_reason,
        delta.stop_reason,
        delta.logprobs,
        delta.prompt_logprobs,
    )


def session_events(event: Event) -> list[Delta | SessionEnd]:
    """What an edge writes for `event`: the same, whoever reads it and whenever."""
    match event:
        case Output():
            return [
                Delta(
                    piece.choice,
                    piece.index,
                    unpack_ids(piece.ids),
                    piece.text,
                    piece.finish_reason,
                    piece.stop_reason,
                    piece.logprobs,
                    piece.prompt_logprobs,
                )
                for piece in event.pieces
            ]
        case Ended():
            error = None
            if event.code:
                error = ERRORS.get(event.code, MeshError)(event.detail, param=event.param)
            usage = (event.prompt_tokens, event.completion_tokens, event.cached_tokens)
            return [SessionEnd(error, *usage)]
    return []


def shown(event: Event) -> list[Shown]:
    """What the writer of an answer is told of `event`."""
    return [event] if isinstance(event, Submitted | Adopted) else [*session_events(event)]
