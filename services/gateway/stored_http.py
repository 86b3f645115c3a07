"""Stored requests over HTTP: a reader of a log, wherever the request runs.

A client that goes away leaves its request running, so that it can come back for it, unless it
cannot know its name: then it is cancelled.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator

import msgspec
from aiohttp import web

from services.gateway.edge import Edge
from services.gateway.openai.chunks import LAST_EVENT_ID, parse_event_id
from services.gateway.openai.request import Checked
from services.gateway.replies import json_response, stream, tenant, writer
from services.gateway.sse import Writer, whole
from services.gateway.stored.events import Ended, Event, Submitted, shown
from services.gateway.stored.feed import LogFeed
from shared.errors import Cancelled, InvalidRequest, MeshError, NotFound

_RESPONSE_ID = re.compile(r"resp_([0-9a-f]{32})")
_NUMBER = re.compile(r"[0-9]{1,9}")


class StoredHttp:
    """Serves them for one gateway."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._store = edge.parts.store
        self._cancelling: set[asyncio.Task[None]] = set()

    def routes(self) -> list[web.RouteDef]:
        """What there is besides `submit` and `resume_chat`."""
        path = "/v1/responses/{id}"
        return [
            web.get(path, self._retrieve),
            web.post(f"{path}/cancel", self._cancel),
            web.delete(path, self._delete),
        ]

    async def close(self) -> None:
        """Leave alone what was still to be cancelled."""
        for task in self._cancelling:
            task.cancel()
        await asyncio.gather(*self._cancelling, return_exceptions=True)

    # --- new ones ---

    async def submit(
        self, request: web.Request, checked: Checked, body: bytes, *, keyed: bool
    ) -> web.StreamResponse:
        """Take `checked`, which came as `body`, and answer it."""
        spec = checked.spec
        asked = Submitted(
            tenant=spec.tenant,
            endpoint=checked.endpoint,
            body=body,
            created=time.time(),
            timeout_s=spec.timeout_s,
        )
        if checked.background and not checked.stream:
            log = await self._store.submit(spec.request_id, asked, keyed=keyed)
            if log.events > 1:  # it was there before
                return await self._object(spec.request_id, request)
            first = log.submitted or asked
            writes = await writer(self._edge, checked, int(first.created))
            return json_response(writes.body([first]))
        try:
            return await self._read(request, checked, asked, keyed=keyed)
        except Cancelled:
            if checked.endpoint != "responses" or checked.stream:
                raise
            return await self._object(spec.request_id, request)

    async def _read(
        self, request: web.Request, checked: Checked, asked: Submitted, *, keyed: bool
    ) -> web.StreamResponse:
        """Take it, and stay until it has ended."""
        request_id, response = checked.spec.request_id, None
        try:
            async with self._reading(request_id, asked.tenant) as feed:
                log = await self._store.submit(request_id, asked, keyed=keyed)
                created = int((log.submitted or asked).created)
                writes = await writer(self._edge, checked, created)
                if not checked.stream:
                    return json_response(await whole(feed, writes, self._edge.config))
                answer = stream(request, self._edge, feed, writes)
                response = answer.response
                await (answer.resume(0) if checked.background else answer.begin())
                return response
        except BaseException:
            if not (keyed or checked.background or (response is not None and response.prepared)):
                self._abandon(request_id, asked.tenant)
            raise

    def _abandon(self, request_id: str, owner: str) -> None:
        """Cancel what nobody can come back for."""

        async def cancel() -> None:
            with contextlib.suppress(MeshError):
                if (await self._store.look(request_id, owner)).ended is None:
                    self._edge.meter.cut("abandoned")
                    await self._store.cancel(request_id, owner)

        task = asyncio.get_running_loop().create_task(cancel())
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)

    # --- those that are there ---

    async def resume_chat(self, request: web.Request) -> web.StreamResponse:
        """The events of a chat after the one that the client saw last."""
        request_id, seen = parse_event_id(request.headers[LAST_EVENT_ID])
        return await self._resume(request, request_id, "chat", seen + 1)

    async def _retrieve(self, request: web.Request) -> web.StreamResponse:
        request_id, query = _response_id(request), request.query
        if query.get("stream", "false") not in ("true", "false"):
            raise InvalidRequest("'stream' must be true or false.", param="stream")
        after = query.get("starting_after")
        if after is not None and not _NUMBER.fullmatch(after):
            raise InvalidRequest(
                "'starting_after' must be a sequence number.", param="starting_after"
            )
        if query.get("stream") == "true":
            skip = 0 if after is None else int(after) + 1
            return await self._resume(request, request_id, "responses", skip)
        if after is not None:
            raise InvalidRequest("'starting_after' needs 'stream=true'.", param="starting_after")
        return await self._object(request_id, request)

    async def _cancel(self, request: web.Request) -> web.StreamResponse:
        request_id = _response_id(request)
        last = (await self._history(request_id, request))[-1]
        if isinstance(last, Ended) and last.code != Cancelled.code:
            raise InvalidRequest("Cannot cancel a response that has ended.")
        await self._store.cancel(request_id, request[tenant])
        return await self._object(request_id, request)

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        request_id = _response_id(request)
        await self._history(request_id, request)
        await self._store.delete(request_id, request[tenant])
        told = {"id": request.match_info["id"], "object": "response", "deleted": True}
        return json_response(msgspec.json.encode(told))

    # --- inside ---

    @contextlib.asynccontextmanager
    async def _reading(self, request_id: str, owner: str) -> AsyncIterator[LogFeed]:
        feed = LogFeed(self._store.follow(request_id, owner))
        with self._edge.reading(feed):
            try:
                yield feed
            finally:
                await feed.close()

    async def _history(
        self, request_id: str, request: web.Request, endpoint: str = "responses"
    ) -> list[Event]:
        """The log so far, of a request of `endpoint`."""
        events = await self._store.history(request_id, request[tenant])
        first = events[0]
        if not isinstance(first, Submitted) or first.endpoint != endpoint:
            raise NotFound(f"There is no stored request '{request_id}' of this kind.")
        return events

    async def _writer(self, request_id: str, events: list[Event]) -> Writer:
        """How the request that `events` begin with is written, by whichever gateway."""
        asked = events[0]
        assert isinstance(asked, Submitted)
        checked = self._edge.stored(request_id, asked)
        return await writer(self._edge, checked, int(asked.created))

    async def _object(self, request_id: str, request: web.Request) -> web.Response:
        events = await self._history(request_id, request)
        writes = await self._writer(request_id, events)
        return json_response(writes.body([told for event in events for told in shown(event)]))

    async def _resume(
        self, request: web.Request, request_id: str, endpoint: str, skip: int
    ) -> web.StreamResponse:
        """Its events without the first `skip`, and those to come."""
        writes = await self._writer(request_id, await self._history(request_id, request, endpoint))
        async with self._reading(request_id, request[tenant]) as feed:
            answer = stream(request, self._edge, feed, writes)
            await answer.resume(skip)
            return answer.response


def _response_id(request: web.Request) -> str:
    given = request.match_info["id"]
    found = _RESPONSE_ID.fullmatch(given)
    if found is None:
        raise NotFound(f"There is no response '{given}'.")
    return found[1]
