"""The bus edge on a real server, from the public account."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import nats
import pytest

from deploy.servers import Server
from shared.client import Client
from shared.errors import Unavailable
from shared.nats_bus import NatsBus
from shared.testing import eventually
from tests.services.gateway.fake_mesh import Front, front

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
async def edge(nats_server: Server) -> AsyncIterator[Front]:
    async def bus() -> NatsBus:
        return await NatsBus.connect(
            nats_server.url, nats_server.user, nats_server.password, name="test"
        )

    buses = [await bus(), await bus()]
    async with front(buses=buses, ping_bus_s=0.1, probe_timeout_s=0.1) as running:
        yield running
    for each in buses:
        await each.close()


async def outsider(server: Server) -> nats.NATS:
    return await nats.connect(server.url, user=server.public_user, password=server.public_password)


async def test_a_plain_client_reads_the_stream(edge: Front, nats_server: Server) -> None:
    """A NATS client that knows nothing of the project submits JSON and reads numbered frames."""
    client = await outsider(nats_server)
    inbox = client.new_inbox()
    messages = await client.subscribe(inbox)
    await client.publish("shoal.v1.generate", json.dumps(CHAT).encode(), reply=inbox)
    frames: list[Any] = []
    while not frames or frames[-1]["event"] != "done":
        message = await messages.next_msg(timeout=10)
        if message.data:
            frames.append(json.loads(message.data))
    await client.close()

    assert [frame["index"] for frame in frames] == list(range(len(frames)))
    text = "".join(f["data"]["choices"][0]["delta"].get("content", "") for f in frames[:-1])
    assert text == "Hello, world!"


async def test_a_plain_client_that_listens_is_left_alone_and_one_that_vanishes_cancelled(
    edge: Front, nats_server: Server
) -> None:
    """The server itself says when nobody listens at an inbox of the other account."""
    edge.mesh.script.stuck_after = 2
    client = await outsider(nats_server)
    inbox = client.new_inbox()
    heard: list[Any] = []

    async def hear(message: Any) -> None:
        heard.append(message)

    await client.subscribe(inbox, cb=hear)
    await client.publish("shoal.v1.generate", json.dumps(CHAT).encode(), reply=inbox)
    await eventually(lambda: sum(not message.data for message in heard) >= 4)
    assert edge.mesh.cancelled == []
    await client.close()

    await eventually(lambda: len(edge.mesh.cancelled) >= 1, what="Cancel seen")
    await edge.quiet()


async def test_the_client_library_from_outside(edge: Front, nats_server: Server) -> None:
    """Our own client with the credentials of an outsider: stream, many at once, leave early."""
    bus = await NatsBus.connect(
        nats_server.url, nats_server.public_user, nats_server.public_password, name="outside"
    )
    client = Client(bus, model="tiny")

    async def one() -> str:
        chunks = [chunk async for chunk in client.chat(messages=CHAT["messages"])]
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)

    assert await asyncio.gather(*(one() for _ in range(16))) == ["Hello, world!"] * 16
    edge.mesh.script.stuck_after = 2
    stream = client.chat(messages=CHAT["messages"])
    await anext(stream)
    await stream.aclose()
    await eventually(lambda: len(edge.mesh.cancelled) >= 1, what="Cancel seen")
    await bus.close()


async def test_nobody_serves(nats_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no gateway there, the client says so instead of waiting for ever."""
    monkeypatch.setattr("shared.client.SILENCE_S", 0.5)
    bus = await NatsBus.connect(
        nats_server.url, nats_server.public_user, nats_server.public_password, name="outside"
    )
    with pytest.raises(Unavailable):
        await Client(bus).whole("chat", messages=CHAT["messages"])
    await bus.close()
