"""An answer of chunks as server-sent events. Those of a stored request have an id that says where
in which answer they are: any gateway that reads the same log writes the same ids.
"""

import re

from services.gateway.events import Delta, SessionEnd
from services.gateway.openai.answer import Answer
from services.gateway.openai.errors import error_body
from services.gateway.openai.request import Checked
from services.gateway.stored.events import Shown
from shared.errors import InvalidRequest, MeshError

DONE = b"data: [DONE]\n\n"
LAST_EVENT_ID = "Last-Event-ID"
_ID = re.compile(r"chatcmpl-([0-9a-f]{32})\.(\d{1,9})")


class ChunkWriter:
    """`answer` as it is streamed, and as a whole."""

    def __init__(self, checked: Checked, answer: Answer) -> None:
        self._checked = checked
        self._answer = answer
        self._count = 0  # of the events that have an id

    def write(self, event: Shown) -> list[bytes]:
        """What a stream sends for `event`, in order."""
        match event:
            case Delta():
                return [self._framed(b"data: %b\n\n" % c) for c in self._answer.chunks(event)]
            case SessionEnd():
                return [self._framed(frame) for frame in self._end(event)]
        return []

    def broken(self, error: MeshError) -> bytes:
        """What a stream says when it ends before its request; it has no id, since nothing is behind
        it.
        """
        return b"data: %b\n\n" % error_body(error) + DONE

    def body(self, events: list[Shown]) -> bytes:
        """The whole answer; the last of `events` is its end."""
        *said, end = events
        assert isinstance(end, SessionEnd)
        for event in said:
            if isinstance(event, Delta):
                self._answer.add(event)
        return self._answer.body(end)

    def _end(self, end: SessionEnd) -> list[bytes]:
        if end.error is not None:
            return [b"data: %b\n\n" % error_body(end.error), DONE]
        if self._checked.include_usage:
            return [b"data: %b\n\n" % self._answer.usage_chunk(end), DONE]
        return [DONE]

    def _framed(self, frame: bytes) -> bytes:
        if not self._checked.store:
            return frame
        name = f"id: chatcmpl-{self._checked.spec.request_id}.{self._count}\n"
        self._count += 1
        return name.encode() + frame


def parse_event_id(text: str) -> tuple[str, int]:
    """(request id, number of the event) of a `Last-Event-ID`; raises `InvalidRequest`."""
    found = _ID.fullmatch(text)
    if found is None:
        raise InvalidRequest(
            f"'{LAST_EVENT_ID}' is not the id of an event of a stored chat.", param=LAST_EVENT_ID
        )
    return found[1], int(found[2])
