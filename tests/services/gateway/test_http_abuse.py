"""What hostile, broken or slow clients do to the HTTP edge: raw sockets."""

import asyncio
import contextlib
import gzip
import json
import re
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.testing import eventually
from tests.services.gateway.fake_mesh import Front, front

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
PATH = "/v1/chat/completions"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connected(edge: Front, receive_buffer: int = 0) -> AsyncIterator[Connection]:
    """A raw connection; `receive_buffer` bytes are all that its kernel takes unread."""
    sock = socket.socket()
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", edge.port))
    limit = 1024 if receive_buffer else 1 << 16
    reader, writer = await asyncio.open_connection(sock=sock, limit=limit)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def request(body: bytes, **headers: str) -> bytes:
    given = {"Host": "x", "Content-Length": str(len(body)), **headers}
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"POST {PATH} HTTP/1.1\r\n{lines}\r\n".encode() + body


async def answer(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """Status and JSON of a response."""
    async with asyncio.timeout(10):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(
            int(line.split(":")[1])
            for line in head.lower().split("\r\n")
            if line.startswith("content-length")
        )
        return int(head.split()[1]), json.loads(await reader.readexactly(length))


async def test_dripping_headers_are_cut() -> None:
    """Headers that never end are cut at `header_timeout_s`, however steadily they drip."""
    async with front(header_timeout_s=0.3) as edge, connected(edge) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n")

        async def drip() -> None:
            while True:
                writer.write(b"X-A: b\r\n")
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        dripping.cancel()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"secret\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_a_quiet_400(
    garbage: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """OpenAI's shape, then the connection is closed; the log has one line without what was sent."""
    async with front() as edge:
        async with connected(edge) as (reader, writer):
            writer.write(garbage)
            status, body = await answer(reader)
            assert (status, body["error"]["type"]) == (400, "invalid_request_error")
            async with asyncio.timeout(10):
                assert await reader.read() == b""
        _, metrics = await edge.get("/metrics")
    assert re.search(r'shoal:http_responses_total{gateway="gateway-0",status="400"} [1-9]', metrics)
    told = capsys.readouterr().out
    assert told.count("not_http") == 1
    assert "Traceback" not in told
    assert "secret" not in told


async def test_a_slow_body_is_a_408() -> None:
    """A body that does not arrive in time is answered, and the connection closed."""
    async with front(body_timeout_s=0.2) as edge, connected(edge) as (reader, writer):
        writer.write(request(b"{" * 100)[:-50])
        status, body = await answer(reader)

        assert (status, body["error"]["code"]) == (408, "request_timeout")
        async with asyncio.timeout(10):
            assert await reader.read() == b""


async def test_large_bodies_get_a_turn_of_the_loop_each() -> None:
    """Ten that arrive at once are not decoded in one go: beats and tokens go out in between."""
    async with front() as edge:
        turns: list[int] = []
        decoded = 0
        running = True

        def turn() -> None:
            turns.append(decoded)
            if running:
                asyncio.get_running_loop().call_soon(turn)

        async def large() -> None:
            nonlocal decoded
            async with edge.gateway.edge.turn(1 << 20):
                decoded += 1

        turn()
        await asyncio.gather(*(large() for _ in range(10)))
        running = False
        assert {*range(10)} <= {*turns}


async def test_an_announced_oversize_body_is_refused_unread() -> None:
    """Content-Length over the limit is a 413 before a byte of the body is read."""
    async with front(body_bytes_max=1000) as edge, connected(edge) as (reader, writer):
        writer.write(request(b"", **{"Content-Length": "1001"}))
        status, body = await answer(reader)

    assert (status, body["error"]["code"]) == (413, "payload_too_large")


async def test_an_unannounced_oversize_body_is_refused() -> None:
    """A chunked body is counted as it comes."""
    async with front(body_bytes_max=1000) as edge, connected(edge) as (reader, writer):
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head.encode() + b"7d0\r\n" + b" " * 2000 + b"\r\n0\r\n\r\n")
        status, body = await answer(reader)

    assert (status, body["error"]["code"]) == (413, "payload_too_large")


async def test_a_compressed_bomb_is_refused() -> None:
    """The limit is on what a body unpacks to; a small compressed body is served."""
    async with front(body_bytes_max=10_000) as edge:
        headers = {"Content-Encoding": "gzip"}
        bomb = gzip.compress(b" " * 10_000_000)
        status, body, _ = await edge.post(PATH, bomb[:9_999], headers)
        assert (status, body["error"]["code"]) == (413, "payload_too_large")
        status, body, _ = await edge.post(PATH, b"no gzip", headers)
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")
        packed = gzip.compress(json.dumps(CHAT).encode())
        assert (await edge.post(PATH, packed, headers))[0] == 200


async def test_a_prompt_too_large_for_the_bus_is_a_413() -> None:
    """What would not fit a message is refused at the edge, not found out by the bus."""
    async with front(wire_bytes_max=1000) as edge:
        for path, big in (
            (PATH, {"messages": [{"role": "user", "content": "x" * 2000}]}),
            ("/v1/completions", {"prompt": ["x" * 600, "y" * 600]}),
            ("/v1/completions", {"prompt": [1] * 300}),
        ):
            status, body, _ = await edge.post(path, big)
            assert (status, body["error"]["code"]) == (413, "payload_too_large")
        assert edge.mesh.generated == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"a": 1} {}',
        b"[" * 100_000,
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"x": "\xff"}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"temperature": NaN, "messages": [{"role": "user", "content": "x"}]}',
        b'{"temperature": 1e999, "messages": [{"role": "user", "content": "x"}]}',
        b"\x81\xa5model\xa4tiny",
    ],
)
async def test_a_malformed_body_is_a_400(body: bytes) -> None:
    """What is not one JSON object is a 400 in OpenAI's shape, and the gateway lives on."""
    async with front() as edge:
        status, answered, _ = await edge.post(PATH, body)

        assert status == 400
        assert answered["error"]["type"] == "invalid_request_error"
        assert (await edge.post(PATH, CHAT))[0] == 200


async def test_large_bodies_share_a_bounded_room_and_small_ones_need_none() -> None:
    """While a large request holds the room, another is a 429, a small one is answered; after its
    end the room is free again.
    """
    large = json.dumps({**CHAT, "padding": "x" * 300_000}).encode()
    long = {**CHAT, "stream": True, "max_tokens": 4000, "ignore_eos": True}
    held = json.dumps({**long, "padding": "x" * 300_000}).encode()
    async with front(large_bytes_max=500_000) as edge:
        async with connected(edge) as (reader, writer):
            edge.mesh.script.step_s = 0.01
            writer.write(request(held))
            await reader.readuntil(b"\r\n\r\n")
            refused, body, _ = await edge.post(PATH, large)
            small, _, _ = await edge.post(PATH, CHAT)
        await edge.quiet()
        after, _, _ = await edge.post(PATH, large)

    assert (refused, small, after) == (429, 200, 200), body


@pytest.mark.parametrize("half", [False, True])
async def test_a_vanished_client_cancels(half: bool) -> None:
    """A connection that closes, or half-closes, in the middle of a stream cancels its request."""
    async with front() as edge, connected(edge) as (reader, writer):
        edge.mesh.script.stuck_after = 2
        writer.write(request(json.dumps({**CHAT, "stream": True}).encode()))
        await reader.readuntil(b"\r\n\r\n")
        if half:
            writer.write_eof()
        else:
            writer.transport.abort()

        await eventually(lambda: len(edge.mesh.cancelled) >= 1, what="Cancel seen")
        await edge.quiet()


async def test_a_reader_that_takes_nothing_is_cut() -> None:
    """A client that stops reading is cut after `write_timeout_s`, and its request cancelled."""
    async with front(write_timeout_s=0.3) as edge, connected(edge, 4096) as (reader, writer):
        edge.mesh.script.pieces = ["x" * 10_000]
        body = {**CHAT, "stream": True, "max_tokens": 4000, "ignore_eos": True}
        writer.write(request(json.dumps(body).encode()))
        await reader.readuntil(b"\r\n")

        await eventually(lambda: len(edge.mesh.cancelled) >= 1, 20, "Cancel seen")
        await edge.quiet()
        assert max(edge.mesh.sent.values()) < 4000


async def test_a_reader_that_lags_by_too_much_is_cut() -> None:
    """Ids held for one reader are bounded."""
    async with front(feed_ids_max=100) as edge, connected(edge) as (_, writer):
        edge.mesh.script.burst = 101
        body = {**CHAT, "stream": True, "max_tokens": 1000, "ignore_eos": True}
        writer.write(request(json.dumps(body).encode()))

        await eventually(lambda: len(edge.mesh.cancelled) >= 1, what="Cancel seen")
        await edge.quiet()


async def test_silence_is_filled_with_pings() -> None:
    """While no id comes, comments keep proxies and clients patient; they are no events."""
    async with front(ping_s=0.05) as edge, connected(edge) as (reader, writer):
        edge.mesh.script.stuck_after = 2
        writer.write(request(json.dumps({**CHAT, "stream": True}).encode()))
        async with asyncio.timeout(10):
            await reader.readuntil(b"lo")
            await reader.readuntil(b": ping\n\n")
            await reader.readuntil(b": ping\n\n")
            edge.mesh.script.stuck_after = None
            rest = await reader.readuntil(b"data: [DONE]\n\n")
        assert b"world" in rest


async def test_patience_for_the_first_id_ends() -> None:
    """A first id that takes longer than `patience_s` begins the stream without it."""
    async with front(patience_s=0.05, ping_s=0.05) as edge, connected(edge) as (reader, writer):
        edge.mesh.script.stuck_after = 0
        writer.write(request(json.dumps({**CHAT, "stream": True}).encode()))
        async with asyncio.timeout(10):
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readuntil(b": ping\n\n")
            edge.mesh.script.stuck_after = None
            await reader.readuntil(b"data: [DONE]\n\n")

    assert b" 200 " in head
    assert b"text/event-stream; charset=utf-8" in head
    assert b"no-cache" in head
    assert b"X-Accel-Buffering: no" in head


async def test_a_step_is_one_write() -> None:
    """What one wake-up finds goes out in one chunk of the body: n choices, one socket write."""
    async with front() as edge, connected(edge) as (reader, writer):
        edge.mesh.script.pieces = ["a"]
        writer.write(request(json.dumps({**CHAT, "stream": True, "n": 8}).encode()))
        async with asyncio.timeout(10):
            await reader.readuntil(b"\r\n\r\n")
            size = int(await reader.readuntil(b"\r\n"), 16)
            first = await reader.readexactly(size)

    assert first.count(b'"role":"assistant"') > 1
