"""What a log says is read by gateways of other versions: bytes that were written stay readable."""

import pytest

from services.gateway.events import Delta, SessionEnd
from services.gateway.stored.events import (
    Adopted,
    CancelRequested,
    Ended,
    Event,
    Opened,
    Output,
    Piece,
    Submitted,
    decode_event,
    encode_event,
    piece_of,
    session_events,
)
from shared.errors import Cancelled, MeshError
from shared.ids import pack_ids
from shared.messages import PromptToken, Tokenized, TokenizedPrompt, TokenText

EVENTS: list[Event] = [
    Submitted(tenant="t", endpoint="chat", body=b"{}", created=1.5, timeout_s=600.0),
    Adopted(gateway="gateway-0-ab"),
    Opened(
        tokenized=Tokenized(
            request_id="r",
            attempt=1,
            tokenizer="tokenizer-0-ab",
            prompts=[TokenizedPrompt(pack_ids([1, 2]), b"h" * 16)],
        ),
        seed=2**64 - 1,
        max_model_len=4096,
    ),
    Output(
        pieces=[
            Piece(0, 7, pack_ids([5]), "a"),
            Piece(
                choice=1,
                index=0,
                ids=pack_ids([6, 7]),
                text="b",
                finish_reason="stop",
                stop_reason="x",
                logprobs=[TokenText(-0.5, "b", b"b", [("c", b"c", -1.0)])],
                prompt_logprobs=[PromptToken(1, "p", b"p")],
            ),
        ]
    ),
    CancelRequested(),
    Ended(
        code="cancelled",
        detail="why",
        param="p",
        prompt_tokens=2,
        completion_tokens=3,
        cached_tokens=1,
    ),
    Ended(),
]

GOLDEN = [
    (
        "86a474797065a95375626d6974746564a674656e616e74a174a8656e64706f696e74a463686174a4"
        "626f6479c4027b7da763726561746564cb3ff8000000000000a974696d656f75745f73cb4082c000"
        "00000000"
    ),
    "82a474797065a741646f70746564a767617465776179ac676174657761792d302d6162",
    (
        "84a474797065a64f70656e6564a9746f6b656e697a656485a474797065a9546f6b656e697a6564aa"
        "726571756573745f6964a172a7617474656d707401a9746f6b656e697a6572ae746f6b656e697a65"
        "722d302d6162a770726f6d7074739192c4080100000002000000c410686868686868686868686868"
        "68686868a473656564cfffffffffffffffffad6d61785f6d6f64656c5f6c656ecd1000"
    ),
    (
        "82a474797065a64f7574707574a670696563657392980007c40405000000a161a0c0c0c0980100c4"
        "080600000007000000a162a473746f70a1789194cbbfe0000000000000a162c401629193a163c401"
        "63cbbff0000000000000919601a170c40170c00090"
    ),
    "81a474797065af43616e63656c526571756573746564",
    (
        "87a474797065a5456e646564a4636f6465a963616e63656c6c6564a664657461696ca3776879a570"
        "6172616da170ad70726f6d70745f746f6b656e7302b1636f6d706c6574696f6e5f746f6b656e7303"
        "ad6361636865645f746f6b656e7301"
    ),
    "81a474797065a5456e646564",
]


@pytest.mark.parametrize(("event", "golden"), list(zip(EVENTS, GOLDEN, strict=True)))
def test_events_are_written_as_they_always_were(event: Event, golden: str) -> None:
    """An event has the bytes it had when it was introduced, and they read as that event."""
    assert encode_event(event).hex() == golden
    assert decode_event(bytes.fromhex(golden)) == event


def test_what_cannot_be_read_is_an_error_of_ours() -> None:
    """Neither garbage nor an event of a later version is taken for anything."""
    for payload in (b"", b"\xc1", b"\x81\xa4type\xa5Later", encode_event(EVENTS[0])[:-1]):
        with pytest.raises(MeshError):
            decode_event(payload)


def test_a_reader_gets_what_the_session_delivered() -> None:
    """A delta and an end come out of the log as they went in, errors with their type."""
    delta = Delta(1, 3, [4, 5], "de", "stop", 5, [TokenText(-1.0, "d", b"d", [])], [])
    assert session_events(Output(pieces=[piece_of(delta)])) == [delta]
    [end] = session_events(EVENTS[5])
    assert isinstance(end, SessionEnd)
    assert isinstance(end.error, Cancelled)
    assert (end.error.detail, end.error.param) == ("why", "p")
    assert (end.prompt_tokens, end.completion_tokens, end.cached_tokens) == (2, 3, 1)
    assert session_events(Ended()) == [SessionEnd(None, 0, 0, 0)]
    assert session_events(Adopted(gateway="g")) == []
