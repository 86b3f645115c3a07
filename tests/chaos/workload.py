"""Clients that ask, over HTTP and over the bus: each writes down what it sees, and judges nothing.

A new way to ask is one more method of `Clients`, or of `StoredRequest` for what outlives a gateway.
"""

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import msgspec

from shared.bus import Delivery
from shared.client import Client, RequestFailed
from shared.errors import MeshError
from shared.kv import HASH_SIZE
from shared.messages import BlocksFound, LookupBlocks, encode
from shared.nats_bus import NatsBus
from shared.subjects import inbox
from tests.chaos.asks import STORED_WAYS, TWICE, Ask
from tests.chaos.history import Asked, Ended, History, How, Told, Used
from tests.chaos.reading import Refused, events, logprobs_of, text_of, unwrap
from tests.chaos.workload_stored import Door, StoredRequest


class Clients:
    """Asks over HTTP and over the bus, `bus` being theirs to close."""

    def __init__(
        self,
        base_url: str,
        model: str,
        bus: NatsBus,
        history: History,
        patience_s: float,
    ) -> None:
        """`patience_s`: without an end for so long, a request counts as silent."""
        self._patience_s = patience_s
        self._base_url = base_url
        self._model = model
        self._nats = bus
        self._bus = Client(bus)
        self._history = history
        self._door = Door(base_url, model, self._bus, history)
        self._numbers = itertools.count()
        self._begun: set[str] = set()  # keys of asks that have got something
        self._heard = asyncio.Event()

    async def close(self) -> None:
        await self._nats.close()

    async def wait_begun(self, keys: set[str], within_s: float) -> None:
        """Return when all these asks have got something; raises `TimeoutError`."""
        async with asyncio.timeout(within_s):
            while not keys <= self._begun:
                self._heard.clear()
                await self._heard.wait()

    async def ask(self, ask: Ask, *, leave_after: int | None = None) -> None:
        """Ask to the end, or leave after so many deliveries."""
        key = secrets.token_hex(8) if ask.way in STORED_WAYS else ""
        clients = 2 if ask.way in TWICE else 1
        await asyncio.gather(*(self._ask(ask, key, leave_after) for _ in range(clients)))

    async def _ask(self, ask: Ask, key: str, leave_after: int | None) -> None:
        request = f"{ask.key}#{next(self._numbers)}"
        self._history.add(
            Asked(request=request, ask=ask.key, way=ask.way, key=key, may_fail=ask.may_fail)
        )
        how: How = "silent"
        code, detail = "", f"no end within {self._patience_s:g} s"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s):
                how, code, detail = await self._end_of(
                    self._chunks(ask, request, key), request, leave_after
                )
        self._history.add(Ended(request=request, how=how, code=code, detail=detail))

    def _chunks(self, ask: Ask, request: str, key: str) -> AsyncGenerator[dict[str, Any]]:
        if key:
            return StoredRequest(self._door, ask, request, key).chunks()
        return self._over_bus(ask) if ask.way == "bus" else self._over_http(ask)

    async def _end_of(
        self, chunks: AsyncGenerator[dict[str, Any]], request: str, leave_after: int | None
    ) -> tuple[How, str, str]:
        """How it ended, the error's code, what was said."""
        deliveries = 0
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    self._note(request, chunk)
                    deliveries += bool(chunk["choices"])
                    if leave_after is not None and deliveries >= leave_after:
                        return "cancelled", "", ""
        except Refused as error:
            return "failed", error.code, error.detail
        except RequestFailed as error:
            return "failed", error.openai_code or error.kind or "", error.detail
        except MeshError as error:  # what the client library itself found out
            return "failed", error.code, f"client: {error.detail}"
        except (aiohttp.ClientError, ConnectionError) as error:
            return "cut", "", f"{type(error).__name__}: {error}"
        return "finished", "", ""

    async def _over_bus(self, ask: Ask) -> AsyncGenerator[dict[str, Any]]:
        body = {**ask.body, "model": self._model, "stream_options": {"include_usage": True}}
        call = self._bus.chat if ask.endpoint == "chat" else self._bus.complete
        async with contextlib.aclosing(call(**body)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _over_http(self, ask: Ask) -> AsyncGenerator[dict[str, Any]]:
        """Chunks of a stream, or the whole answer as the only one. Raises `Refused`."""
        path = "chat/completions" if ask.endpoint == "chat" else "completions"
        body = {**ask.body, "model": self._model}
        if ask.way == "stream":
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.post(f"{self._base_url}/v1/{path}", json=body) as response,
        ):
            if response.status != 200 or ask.way == "whole":
                yield unwrap(await response.read())
                return
            ended = False
            async for _, data in events(response.content):
                if ended:
                    raise Refused("", f"after its end the stream said {data[:80]!r}")
                if data == b"[DONE]":
                    ended = True
                else:
                    yield unwrap(data)
            if not ended:
                raise ConnectionResetError("the stream ended without its end")

    def _note(self, request: str, chunk: dict[str, Any]) -> None:
        for choice in chunk["choices"]:
            numbers, text = logprobs_of(choice), text_of(choice)
            tokens = len(numbers or ()) if numbers or not text else None
            self._history.add(
                Told(
                    request=request,
                    choice=choice["index"],
                    text=text,
                    tokens=tokens,
                    logprobs=numbers or (),
                    finish=choice["finish_reason"] or "",
                )
            )
        if chunk["choices"]:
            self._begun.add(request.rpartition("#")[0])
            self._heard.set()
        usage = chunk.get("usage")
        if usage:
            prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
            self._history.add(
                Used(request=request, prompt_tokens=prompt, completion_tokens=completion)
            )


class Lookups:
    """Asks kv_tier as a worker does, again and again; each question is to be answered in time, with
    whatever: a cache that cannot say is a miss.
    """

    EVERY_S = 0.05
    ANSWER_S = 2.0  # several times what kv_tier may wait for Redis

    def __init__(self, bus: NatsBus, kv_tier: str, history: History) -> None:
        self._bus = bus
        self._kv_tier = kv_tier
        self._history = history
        self._worker = f"chaos-{secrets.token_hex(4)}"
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def burst(self, count: int) -> None:
        """All at once, so that kv_tier opens as many connections as it may."""
        subscription = await self._bus.subscribe(inbox(self._worker), self._answered)
        await asyncio.gather(*map(self._ask, range(count)))
        await subscription.unsubscribe()

    async def run(self, over: asyncio.Event) -> None:
        """One after the other until `over`, whether they are answered or not."""
        subscription = await self._bus.subscribe(inbox(self._worker), self._answered)
        questions: list[asyncio.Task[None]] = []
        while not over.is_set():
            questions.append(asyncio.create_task(self._ask(len(questions))))
            await asyncio.sleep(self.EVERY_S)
        await asyncio.gather(*questions)
        await subscription.unsubscribe()

    async def _ask(self, number: int) -> None:
        request = f"lookup#{number}"
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self._history.add(Asked(request=request, ask="lookup", way="lookup"))
        question = LookupBlocks(
            lookup_id=number, worker=self._worker, block_hashes=secrets.token_bytes(4 * HASH_SIZE)
        )
        self._bus.publish(inbox(self._kv_tier), encode(question))
        how: How = "finished"
        try:
            async with asyncio.timeout(self.ANSWER_S):
                await self._waiting[number]
        except TimeoutError:
            how = "silent"
        self._history.add(Ended(request=request, how=how))

    def _answered(self, delivery: Delivery) -> None:
        found = msgspec.msgpack.decode(delivery.payload, type=BlocksFound)
        waiting = self._waiting[found.lookup_id]
        if not waiting.done():
            waiting.set_result(None)
