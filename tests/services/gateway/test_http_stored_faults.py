"""Stored requests over HTTP: clients that leave or stall, stores away, gateways that stop."""

import asyncio
from pathlib import Path

import aiohttp
import openai
import pytest
from msgspec.structs import replace

from deploy.servers import Server, start, start_nats
from shared.subjects import stored
from shared.testing import eventually
from tests.services.gateway.fake_mesh import front
from tests.services.gateway.pair import (
    ASK,
    CHAT,
    CHATS,
    RESPONSES,
    STORED,
    Pair,
    settled,
    sse,
    until_stuck,
)
from tests.services.gateway.stored.duo import TEXT, duo

# --- clients that leave ---


@pytest.mark.parametrize("how", ["whole", "keyed", "stream", "chat"])
async def test_who_cannot_come_back_leaves_nothing_running(pair: Pair, how: str) -> None:
    """A client that goes away before it can know the name of its request cancels it; else the
    request goes on to its end.
    """
    pair.script.stuck_after = 2
    path, body = (CHATS, CHAT) if how == "chat" else (RESPONSES, ASK)
    body = {**body, "store": True, "stream": how in ("stream", "chat")}
    headers = {"Idempotency-Key": "k"} if how == "keyed" else {}
    async with aiohttp.ClientSession() as session:
        asked = session.post(pair.urls[0] + path, json=body, headers=headers)
        if how in ("stream", "chat"):
            async with asked as answer:
                await answer.content.readuntil(b"lo")
        else:
            waiting = asyncio.create_task(asked.__aenter__())
            await eventually(lambda: 2 in pair.mesh.sent.values())
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
    await eventually(lambda: all(g.edge.idle.is_set() for g in pair.duo.gateways))
    if how == "whole":
        await pair.quiet()
        assert pair.mesh.cancelled
    else:
        pair.script.stuck_after = None
        await pair.quiet()
        assert pair.mesh.sent.popitem()[1] == 5
        assert not pair.mesh.cancelled


# --- faults ---


async def test_without_jetstream_only_stored_requests_are_refused() -> None:
    """A 503 that says when to come back; the others notice nothing."""
    async with front() as edge:
        for path, body in ((RESPONSES, ASK), (CHATS, {**CHAT, "store": True})):
            status, answer, headers = await edge.post(path, body)
            assert (status, answer["error"]["type"]) == (503, "server_error")
            assert int(headers["Retry-After"]) >= 1
        assert (await edge.post(RESPONSES, {**ASK, "store": False}))[0] == 200
        assert (await edge.post(CHATS, CHAT))[0] == 200


async def test_a_full_store_refuses_new_ones_alone(nats_server: Server) -> None:
    """The same, once what is stored has taken its share; what is stored can be read."""
    megabytes = 20  # a fifth of them is more than what is asked before a gateway looks again
    async with duo(nats_server, replace(STORED, bytes_max=megabytes << 20)) as running:
        pair = Pair(running)
        async with pair.client(0) as client:
            response = await client.responses.create(**ASK, metadata={"a": "x" * 500})
            jetstream = running.gateways[0].edge.parts.store.jetstream
            for number in range(megabytes * 17 // 20):
                await jetstream.append(stored(f"{number:032x}"), bytes(1 << 20), 0)
            async with asyncio.timeout(20):
                while (await pair.call(RESPONSES, {**ASK, "metadata": {"a": "x" * 500}}))[0] == 200:
                    pass
            status, _, headers = await pair.call(RESPONSES, ASK)
            assert (status, headers["Retry-After"]) == (503, "5")
            assert (await pair.call(CHATS, CHAT))[0] == 200
            assert await client.responses.retrieve(response.id) == response


async def test_a_gateway_that_stops_sends_its_readers_to_another(nats_server: Server) -> None:
    """The stream ends with a typed error, numbered so that a client that goes on from it misses
    nothing.
    """
    async with duo(nats_server, STORED, drain_s=0.1) as running:
        pair = Pair(running)
        pair.script.stuck_after = 2
        async with pair.client(0) as one, pair.client(1) as two:
            stream = await one.responses.create(**ASK, stream=True)
            seen = await until_stuck(stream)
            running.gateways[0].stop()
            [error] = [event async for event in stream]
            assert (error.type, error.code) == ("error", "unavailable")
            pair.script.stuck_after = None
            response_id = seen[0].response.id
            seen += [
                event
                async for event in await two.responses.retrieve(
                    response_id, stream=True, starting_after=error.sequence_number
                )
            ]
    assert [event.sequence_number for event in seen] == [*range(len(seen))]
    assert seen[-1].response.output_text == TEXT


async def test_silence_is_filled_with_pings(nats_server: Server) -> None:
    """As in any other stream."""
    async with duo(nats_server, STORED, ping_s=0.05) as running:
        pair = Pair(running)
        pair.script.stuck_after = 2
        async with (
            aiohttp.ClientSession() as session,
            session.post(pair.urls[0] + RESPONSES, json={**ASK, "stream": True}) as answer,
        ):
            async with asyncio.timeout(10):
                for _ in range(2):
                    await answer.content.readuntil(b": ping\n\n")
            pair.script.stuck_after = None
            assert b"response.completed" in await answer.read()


async def test_too_many_readers_are_refused(nats_server: Server) -> None:
    """What is read from logs is bounded, as sessions are."""
    async with duo(nats_server, STORED, sessions_max=2) as running:
        pair = Pair(running)
        pair.script.stuck_after = 2
        async with pair.client() as client:
            streams = [await client.responses.create(**ASK, stream=True) for _ in range(2)]
            with pytest.raises(openai.RateLimitError):
                await client.responses.create(**ASK, stream=True)
            pair.script.stuck_after = None
            for stream in streams:
                assert [event async for event in stream][-1].type == "response.completed"


async def test_a_reader_that_takes_nothing_is_cut_and_its_request_goes_on(
    nats_server: Server,
) -> None:
    """After `write_timeout_s`, as of any other stream."""
    async with duo(nats_server, STORED, write_timeout_s=0.3) as running:
        pair = Pair(running)
        pair.script.pieces = ["x" * 10_000]
        body = {**ASK, "stream": True, "max_output_tokens": 400, "ignore_eos": True}
        async with (
            aiohttp.ClientSession(read_bufsize=1024) as session,
            session.post(pair.urls[0] + RESPONSES, json=body) as answer,
        ):
            first = await answer.content.readuntil(b"\n\n")
            await eventually(pair.duo.gateways[0].edge.idle.is_set, 20, "it was cut")
        response_id = sse(first)[0]["data"]["response"]["id"]
        async with pair.client(1) as client:
            response = await settled(client, response_id)
        assert response.output_text == "x" * 4_000_000


async def test_a_stream_whose_store_is_gone_ends_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before the time of its request is over: the store may come back."""
    monkeypatch.setattr("services.gateway.stored.store.GRACE_S", 0.1)
    server = start_nats(tmp_path)
    async with duo(server.server, replace(STORED, append_timeout_s=0.2)) as running:
        pair = Pair(running)
        pair.script.stuck_after = 2
        async with pair.client() as client:
            stream = await client.responses.create(
                **ASK, stream=True, extra_headers={"X-Request-Timeout-Ms": "3000"}
            )
            await until_stuck(stream)
            server.process.kill()
            server.process.wait()
            [error] = [event async for event in stream]
        assert (error.type, error.code) == ("error", "unavailable")
        server = start(server.server)
    server.stop()
