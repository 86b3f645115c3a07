"""Clients write down what they see, whatever a server does to them; what they ask is a function of
the seed.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from deploy.servers import Server
from shared.nats_bus import NatsBus
from tests.chaos.asks import (
    STORED_WAYS,
    TURNS,
    Ask,
    conversations,
    mixed,
    salted,
    stored,
    streams,
)
from tests.chaos.history import Asked, Ended, History, How, Told, Used
from tests.chaos.workload import Clients

CHUNK = '{"choices":[{"index":0,"text":" word","finish_reason":%s,"logprobs":null}]}'
GOING, LAST = CHUNK % "null", CHUNK % '"stop"'
USAGE = '{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}'
ERROR = '{"error":{"message":"no worker","type":"server_error","code":"unavailable"}}'
DONE = "[DONE]"


def test_the_same_seed_asks_the_same() -> None:
    """A run can be replayed; another seed asks something else."""
    assert streams(7, 6, 50) == streams(7, 6, 50) != streams(8, 6, 50)
    assert mixed(7, 12) == mixed(7, 12) != mixed(8, 12)
    assert stored(7, 5, 50) == stored(7, 5, 50) != stored(8, 5, 50)
    assert conversations(7, 6, 50) == conversations(7, 6, 50) != conversations(8, 6, 50)
    asks = [*streams(7, 6, 50), *conversations(7, 6, 50), *stored(7, 5, 50), *mixed(7, 12)]
    assert len({ask.key for ask in asks}) == len(asks)
    assert {ask.way for ask in asks} == {"stream", "whole", "bus", *STORED_WAYS}
    assert {ask.way for ask in stored(7, 5, 50)} == STORED_WAYS
    assert all("seed" in ask.body for ask in asks), "or an answer is not a function of its request"


def test_conversations_share_their_beginnings() -> None:
    """All begin alike, a turn begins with those before it, and a salt changes nothing else."""
    asks = conversations(7, 2 * TURNS, 50)
    said = [ask.body["messages"] for ask in asks]
    assert len({str(messages[0]) for messages in said}) == 1
    assert said[1][: len(said[0])] == said[0] != said[TURNS]
    for ask, cold in zip(asks, salted(asks, "salt"), strict=True):
        assert cold == ask._replace(body={**ask.body, "cache_salt": "salt"})


class Bench:
    """Clients of a server that says `events` and then closes, or hangs."""

    def __init__(self, bus: NatsBus, history: History) -> None:
        self._bus = bus
        self._history = history
        self.url = ""
        self.patience_s = 30.0
        self.events: list[str] = []
        self.status = 200
        self.hangs = False

    async def serve(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        if self.status != 200:
            return web.Response(status=self.status, text=self.events[0])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in self.events:
            await response.write(f": ping\n\ndata: {event}\n\n".encode())
        if self.hangs:
            await asyncio.Event().wait()
        return response

    async def ask(self, *, leave_after: int | None = None) -> Ended:
        """One stream to its end."""
        ask = Ask("key", "stream", "completions", {"prompt": "x"})
        clients = Clients(self.url, "m", self._bus, self._history, self.patience_s)
        await clients.ask(ask, leave_after=leave_after)
        asked, *told, ended = self._history.lines
        assert isinstance(asked, Asked)
        assert isinstance(ended, Ended)
        assert all(isinstance(line, Told | Used) for line in told)
        return ended

    @property
    def told(self) -> list[Told]:
        return [line for line in self._history.lines if isinstance(line, Told)]


@pytest.fixture
async def bench(nats_server: Server, tmp_path: Path) -> AsyncIterator[Bench]:
    server = nats_server
    async with contextlib.AsyncExitStack() as stack:
        bus = await NatsBus.connect(server.url, server.user, server.password, name="clients")
        stack.push_async_callback(bus.close)
        bench = Bench(bus, stack.enter_context(History(tmp_path / "history.jsonl")))
        app = web.Application()
        app.add_routes([web.post("/v1/completions", bench.serve)])
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        bench.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield bench


@pytest.mark.parametrize(
    ("events", "how", "code"),
    [
        ([GOING, LAST, USAGE, DONE], "finished", ""),
        ([GOING, LAST, USAGE], "cut", ""),
        ([], "cut", ""),
        ([GOING, ERROR, DONE], "failed", "unavailable"),
        ([GOING, '{"error":{}}', DONE], "failed", ""),
        ([GOING, "<html>", DONE], "failed", ""),
        ([LAST, DONE, GOING], "failed", ""),
        ([LAST, DONE, DONE], "failed", ""),
    ],
)
async def test_how_a_stream_ended(bench: Bench, events: list[str], how: How, code: str) -> None:
    """An end without a shape, and whatever follows the end, is a failure without a code."""
    bench.events = events
    ended = await bench.ask()
    assert (ended.how, ended.code) == (how, code)
    assert len(bench.told) == sum(event in (GOING, LAST) for event in events[:2])


@pytest.mark.parametrize(("body", "code"), [(ERROR, "unavailable"), ("<html>", "")])
async def test_a_refusal_has_a_shape_or_no_code(bench: Bench, body: str, code: str) -> None:
    bench.status, bench.events = 503, [body]
    ended = await bench.ask()
    assert (ended.how, ended.code) == ("failed", code)


async def test_silence_is_told_from_a_cut(bench: Bench) -> None:
    """The server is there and says nothing."""
    bench.hangs, bench.patience_s = True, 0.2
    assert (await bench.ask()).how == "silent"


async def test_a_client_that_leaves_has_cancelled(bench: Bench) -> None:
    bench.events, bench.hangs = [GOING, GOING, GOING], True
    assert (await bench.ask(leave_after=2)).how == "cancelled"
    assert len(bench.told) == 2
