"""Clients of stored requests: whatever becomes of a connection, they come back for their answer.

Each asks under an idempotency key, so that it can ask again before it knows the request's name.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, NamedTuple

import aiohttp

from shared.client import Client, RequestFailed
from tests.chaos.asks import Ask
from tests.chaos.history import History, Named, Numbered
from tests.chaos.reading import Refused, chunk, events, grown, last_chunk, unwrap

AGAIN_S = 0.1
POLL_S = 0.1
REFUSED_S = 15.0  # longer than any fault keeps the store away
FOR_NOW = frozenset({"unavailable", "overloaded"})
WITH_USAGE = {"stream_options": {"include_usage": True}}
FINAL = frozenset(f"response.{status}" for status in ("completed", "incomplete", "failed"))

Chunks = AsyncGenerator[dict[str, Any]]


class Door(NamedTuple):
    """Where a mesh is asked, and who writes down what it says."""

    base_url: str
    model: str
    bus: Client
    history: History


class RefusedForNow(Refused):
    """Nothing is wrong with the request: it may be sent again."""


class StoredRequest:
    """One client of one stored request, over as many connections as it takes."""

    def __init__(self, door: Door, ask: Ask, request: str, key: str) -> None:
        self._door = door
        self._ask = ask
        self._request = request
        self._key = key
        self._id = ""  # the request's name, once the mesh has said it
        self._seen = -1  # number of the last event
        self._event_id = ""  # the same of a chat
        self._told = ""
        self._ended = False

    async def chunks(self) -> Chunks:
        """The answer, as chunks of a completion; a refusal for now is waited out for a while.

        Raises `Refused`, and what the client library raises.
        """
        ways: dict[str, Callable[[], Chunks]] = {
            "response": self._response,
            "polled": self._polled,
            "keyed": self._keyed,
            "kept": self._kept,
            "job": self._job,
        }
        patient_until = time.monotonic() + REFUSED_S
        while not self._ended:
            try:
                async with contextlib.aclosing(ways[self._ask.way]()) as chunks:
                    async for one in chunks:
                        yield one
            except RefusedForNow:
                if time.monotonic() > patient_until:
                    raise
            except (aiohttp.ClientError, ConnectionError):
                pass  # on another connection, then
            if not self._ended:
                await asyncio.sleep(AGAIN_S)

    # --- ways; each may be begun again at any time, and goes on where the client stands ---

    async def _response(self) -> Chunks:
        """A stream of a response's events."""
        rest = f"responses/{self._id}?stream=true&starting_after={self._seen}"
        opened = self._open("GET", rest) if self._id else self._post("responses", stream=True)
        async with opened as answer:
            async for _, data in events(answer.content):
                event = unwrap(data)
                if event["type"] == "error":
                    return  # of this gateway, not of the response
                self._note(event["sequence_number"], last=event["type"] in FINAL)
                if "response" in event:
                    self._named(event["response"]["id"])
                if event["type"] == "response.output_text.delta":
                    yield self._tell(event["delta"])
                elif event["type"] in FINAL:
                    yield last_chunk(event["response"], self._told)

    async def _polled(self) -> Chunks:
        """A response in the background, looked at now and then."""
        if not self._id:
            async with self._post("responses", background=True) as answer:
                self._named(unwrap(await answer.read())["id"])
        while not self._ended:
            async with self._open("GET", f"responses/{self._id}") as answer:
                response = unwrap(await answer.read())
            if response["status"] not in ("queued", "in_progress"):
                self._ended = True
                yield last_chunk(response, self._told)
            elif text := grown(response, self._told):
                yield self._tell(text)
            else:
                await asyncio.sleep(POLL_S)

    async def _keyed(self) -> Chunks:
        """A whole response."""
        async with self._post("responses") as answer:
            response = unwrap(await answer.read())
        self._named(response["id"])
        self._ended = True
        yield last_chunk(response, self._told)

    async def _kept(self) -> Chunks:
        """A stored chat; what has no id is not part of it."""
        path, fields = "chat/completions", {"stream": True, "store": True, **WITH_USAGE}
        seen = {"Last-Event-ID": self._event_id}
        opened = (
            self._open("POST", path, None, seen) if self._event_id else self._post(path, **fields)
        )
        async with opened as answer:
            async for event_id, data in events(answer.content):
                if not event_id:
                    return
                name, _, number = event_id.rpartition(".")
                self._named(name)
                self._event_id = event_id
                self._note(int(number), last=data == b"[DONE]")
                if not self._ended:
                    yield unwrap(data)

    async def _job(self) -> Chunks:
        """A request handed in on the bus, and followed there; the library repairs what is lost."""
        if not self._id:
            body = {**self._ask.body, **WITH_USAGE, "model": self._door.model}
            try:
                name = await self._door.bus.submit("completions", key=self._key, **body)
            except RequestFailed as error:
                if error.openai_code in FOR_NOW:
                    raise RefusedForNow(error.openai_code, error.detail) from None
                raise
            self._named(name)
        async with contextlib.aclosing(self._door.bus.follow(self._id)) as chunks:
            async for one in chunks:
                yield one
        self._ended = True

    # --- inside ---

    def _post(
        self, path: str, **fields: object
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        body = {**self._ask.body, "model": self._door.model, **fields}
        return self._open("POST", path, body, {"Idempotency-Key": self._key})

    @contextlib.asynccontextmanager
    async def _open(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer of status 200, on a connection of its own. Raises `Refused`."""
        url = f"{self._door.base_url}/v1/{path}"
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.request(method, url, json=body, headers=headers) as answer,
        ):
            if answer.status != 200:
                raise refusal(answer.status, await answer.read())
            yield answer

    def _tell(self, text: str) -> dict[str, Any]:
        self._told += text
        return chunk(text)

    def _note(self, number: int, *, last: bool) -> None:
        self._seen = number
        self._ended = self._ended or last
        self._door.history.add(Numbered(request=self._request, number=number, last=last))

    def _named(self, name: str) -> None:
        if name != self._id:
            self._id = name
            self._door.history.add(Named(request=self._request, name=name))


def refusal(status: int, data: bytes) -> Refused:
    """What an answer that is none says."""
    try:
        unwrap(data)
    except Refused as error:
        for_now = status in (429, 503) and error.code in FOR_NOW
        return RefusedForNow(error.code, error.detail) if for_now else error
    return Refused("", f"status {status} without an error: {data[:200]!r}")
