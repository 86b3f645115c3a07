"""Session events -> the events of a Responses stream, and the response object itself.

What is written is a function of the events alone, sequence numbers included, so any gateway that
reads the same log writes the same stream; a reader that comes back names the last number it saw.
Source: OpenAI API reference, "Responses" and its streaming events.
"""

from typing import Any, Literal

import msgspec

from services.gateway.events import Delta, SessionEnd
from services.gateway.feed import merge
from services.gateway.openai.errors import error_object
from services.gateway.openai.logprobs import chat_logprobs
from services.gateway.openai.request import Checked
from services.gateway.stored.events import Adopted, Shown, Submitted
from shared.errors import Cancelled, MeshError
from shared.messages import TokenText

_json = msgspec.json.Encoder()

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseWriter:
    """One response as it grows, event by event. A log says when it was taken and begun; where
    there is none, its first id does.
    """

    def __init__(self, asked: Checked, created: int) -> None:
        self.sequence_number = 0  # of the next event
        self.status: Status = "queued"
        self._asked = asked
        self._created = created
        self._request_id = asked.spec.request_id
        self._item_id = f"msg_{self._request_id}"
        self._texts: list[str] = []
        self._logprobs: list[TokenText] = []
        self._opened = False  # the message, by its first text
        self._finish = ""
        self._error: MeshError | None = None
        self._usage: dict[str, Any] | None = None

    @property
    def id(self) -> str:
        return f"resp_{self._request_id}"

    def write(self, event: Shown) -> list[bytes]:
        """What a stream sends for `event`, in order."""
        taken = [] if self.sequence_number else self._taken()
        match event:
            case Submitted():
                return taken
            case Adopted():
                return taken + self._begun()
            case Delta():
                return taken + self._begun() + self._add(event)
            case SessionEnd():
                return taken + self._end(event)

    def broken(self, error: MeshError) -> bytes:
        """What a stream says when it ends before its response. No other reader is told, so it has
        the number of the event before it: a client may go on from there.
        """
        told = error_object(error)
        fields = {"code": told["code"], "message": told["message"], "param": told["param"]}
        number = max(self.sequence_number - 1, 0)
        return _framed("error", {"sequence_number": number, **fields})

    def body(self, events: list[Shown]) -> bytes:
        """The response object after `events`."""
        for event in merge(events):
            self.write(event)
        return _json.encode(self._object())

    # --- pieces ---

    def _taken(self) -> list[bytes]:
        events = [self._whole("response.created")]
        if self._asked.background:
            events.append(self._whole("response.queued"))
        return events

    def _begun(self) -> list[bytes]:
        """Nothing when another gateway takes over."""
        if self.status != "queued":
            return []
        self.status = "in_progress"
        return [self._whole("response.in_progress")]

    def _add(self, delta: Delta) -> list[bytes]:
        self._finish = delta.finish_reason or self._finish
        if not delta.text and not delta.logprobs:
            return []
        self._texts.append(delta.text)
        self._logprobs += delta.logprobs or []
        return [
            *self._open(),
            self._event(
                "response.output_text.delta",
                **self._place(),
                delta=delta.text,
                logprobs=_shown(delta.logprobs or []),
            ),
        ]

    def _end(self, end: SessionEnd) -> list[bytes]:
        """The parts that were open, then the whole response."""
        self._error = end.error
        self._usage = _usage(end)
        if end.error is not None:
            self.status = "cancelled" if isinstance(end.error, Cancelled) else "failed"
            # There is no event for a cancel: a stream that is cancelled ends as one that failed.
            return [self._whole("response.failed")]
        closing = [*self._open(), *self._close()]
        self.status = "incomplete" if self._finish == "length" else "completed"
        return [*closing, self._whole(f"response.{self.status}")]

    def _open(self) -> list[bytes]:
        if self._opened:
            return []
        self._opened = True
        item = {**self._message("in_progress"), "content": []}
        return [
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._place(), part=_part("", [])),
        ]

    def _close(self) -> list[bytes]:
        text, logprobs = "".join(self._texts), _shown(self._logprobs)
        status = "incomplete" if self._finish == "length" else "completed"
        return [
            self._event("response.output_text.done", **self._place(), text=text, logprobs=logprobs),
            self._event("response.content_part.done", **self._place(), part=_part(text, logprobs)),
            self._event("response.output_item.done", output_index=0, item=self._message(status)),
        ]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _whole(self, kind: str) -> bytes:
        return self._event(kind, response=self._object())

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self.sequence_number
        self.sequence_number += 1
        return _framed(kind, {"sequence_number": number, **fields})

    def _message(self, status: str) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_part("".join(self._texts), _shown(self._logprobs))],
        }

    def _output(self) -> list[dict[str, Any]]:
        if not self._opened:
            return []
        done = self.status if self.status in ("in_progress", "completed") else "incomplete"
        return [self._message(done)]

    def _object(self) -> dict[str, Any]:
        asked, spec = self._asked, self._asked.spec
        incomplete = {"reason": "max_output_tokens"} if self.status == "incomplete" else None
        failed = self._error is not None and self.status == "failed"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": self.status,
            "background": asked.background,
            "error": _error(self._error) if self._error is not None and failed else None,
            "incomplete_details": incomplete,
            "instructions": asked.instructions,
            "max_output_tokens": spec.max_tokens,
            "metadata": asked.metadata,
            "model": spec.model,
            "output": self._output(),
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": asked.store,
            "temperature": spec.sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": spec.sampling.logprobs or 0,
            "top_p": spec.sampling.top_p,
            "truncation": "disabled",
            "usage": self._usage,
        }


def _framed(kind: str, fields: dict[str, Any]) -> bytes:
    """One event of a stream, its name before its data."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _json.encode({"type": kind, **fields}))


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _shown(tokens: list[TokenText]) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = chat_logprobs(tokens)["content"]
    return shown


def _error(error: MeshError) -> dict[str, Any]:
    """`code` is one that the official client's types know."""
    code = "rate_limit_exceeded" if error.status == 429 else "server_error"
    return {"code": code if error.status >= 429 else "invalid_prompt", "message": error.detail}


def _usage(end: SessionEnd) -> dict[str, Any]:
    return {
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": {"cached_tokens": end.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": end.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": end.prompt_tokens + end.completion_tokens,
    }
