"""Two accounts on one server (ADR 2), seen with plain nats-py, which knows nothing of ours."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator

import nats
import pytest
from nats.aio.client import Client
from nats.errors import NoRespondersError

from deploy.servers import Server
from shared.bus import Delivery
from shared.errors import DeadlineExceeded, Unavailable
from shared.nats_bus import NatsBus
from shared.subjects import GENERATE, JOBS, REPLAY
from shared.testing import eventually


@contextlib.asynccontextmanager
async def gateway(server: Server) -> AsyncIterator[NatsBus]:
    """A client of the internal account."""
    bus = await NatsBus.connect(server.url, server.user, server.password, name="gateway")
    try:
        yield bus
    finally:
        await bus.close()


class Outsider:
    """A client of the public account; `refused` holds what the server did not let it do."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self.heard: list[tuple[str, bytes]] = []
        self.client: Client

    async def settle(self) -> None:
        """The server knows all it was sent: nats-py's first flush overtakes what is queued."""
        await self.client.flush()
        await self.client.flush()

    async def note(self, message: nats.aio.client.Msg) -> None:
        self.heard.append((message.subject, message.data))


@contextlib.asynccontextmanager
async def outsider(server: Server) -> AsyncIterator[Outsider]:
    who = Outsider()

    async def refused(error: Exception) -> None:
        who.refused.append(str(error).lower())

    who.client = await nats.connect(
        server.url, user=server.public_user, password=server.public_password, error_cb=refused
    )
    try:
        yield who
    finally:
        await who.client.close()


async def test_the_bus_of_an_outsider_asks_for_nothing_it_is_refused(nats_server: Server) -> None:
    """It listens for answers among insiders from its first request on, and makes none."""
    user, password = nats_server.public_user, nats_server.public_password
    bus = await NatsBus.connect(nats_server.url, user, password, name="outsider")
    try:
        await bus.flush()
        assert bus.counters["errors"] == 0
    finally:
        await bus.close()


@pytest.mark.parametrize("subject", [GENERATE, REPLAY, JOBS])
async def test_one_submission_many_answers(nats_server: Server, subject: str) -> None:
    """An outsider's inbox hears a thousand answers, in order, from the one gateway of two that
    took the submission out of the queue group.
    """
    async with (
        gateway(nats_server) as first,
        gateway(nats_server) as second,
        outsider(nats_server) as who,
    ):
        taken: list[tuple[NatsBus, Delivery]] = []
        for bus in (first, second):
            await bus.subscribe(
                subject, lambda delivery, bus=bus: taken.append((bus, delivery)), queue="gateway"
            )
        inbox = who.client.new_inbox()
        await who.client.subscribe(inbox, cb=who.note)
        await who.client.publish(subject, b'{"prompt": "hello"}', reply=inbox)
        await eventually(lambda: len(taken) == 1)
        bus, asked = taken[0]
        assert asked.reply == inbox
        assert asked.payload == b'{"prompt": "hello"}'
        answers = [(inbox, b"%d" % number) for number in range(1000)]
        for _, payload in answers:
            bus.publish(asked.reply, payload)
        await eventually(lambda: len(who.heard) == 1000)
        assert who.heard == answers
        await bus.flush()
        assert len(taken) == 1


@pytest.mark.parametrize("leaves", ["unsubscribes", "closes", "breaks"])
async def test_a_gateway_learns_that_the_outsider_is_gone(nats_server: Server, leaves: str) -> None:
    """A frame sent as a request: nobody listening is told at once; a listener hears the frame."""
    async with gateway(nats_server) as bus, outsider(nats_server) as who:
        inbox = who.client.new_inbox()
        subscription = await who.client.subscribe(inbox, cb=who.note)
        await who.client.publish(GENERATE, b"")
        await who.settle()
        probe = asyncio.create_task(bus.request(inbox, b"frame", 60.0))
        await eventually(lambda: who.heard == [(inbox, b"frame")])
        assert not probe.done(), "somebody listens, so there is no answer yet"
        probe.cancel()
        if leaves == "unsubscribes":
            await subscription.unsubscribe()
            await who.settle()
        elif leaves == "closes":
            await who.client.close()
        else:
            who.client.options["allow_reconnect"] = False
            who.client._transport._io_writer.transport.abort()

        async def gone() -> None:
            while True:
                with contextlib.suppress(DeadlineExceeded):
                    await bus.request(inbox, b"frame", 1.0)

        with pytest.raises(Unavailable):
            await asyncio.wait_for(gone(), 10)


async def test_an_outsider_learns_that_there_is_no_gateway(nats_server: Server) -> None:
    """A plain request is refused at once, not after its timeout."""
    async with outsider(nats_server) as who:
        with pytest.raises(NoRespondersError):
            await who.client.request(GENERATE, b"", timeout=60)


@pytest.mark.parametrize(
    "subject",
    [
        "mesh.v1.>",
        "mesh.v1.in.*",
        ">",
        "*.v1.>",
        "_MESH_INBOX.>",
        "$SRV.>",
        "$JS.>",
        "$SYS.>",
        GENERATE,
        JOBS,
    ],
)
async def test_the_public_account_cannot_listen_in(nats_server: Server, subject: str) -> None:
    """Refused, and nothing internal is heard: neither messages, requests, nor their answers."""
    async with (
        gateway(nats_server) as one,
        gateway(nats_server) as two,
        outsider(nats_server) as who,
    ):
        await who.client.subscribe(subject, cb=who.note)
        await eventually(lambda: len(who.refused) == 1)
        assert "permissions violation for subscription" in who.refused[0]
        own = f"mesh.v1.in.{uuid.uuid4().hex}"
        await one.subscribe(own, lambda asked: one.publish(asked.reply, b"secret"))
        await two.request(own, b"secret", 5.0)
        two.publish("mesh.v1.died", b"secret")
        await two.flush()
        await who.settle()
        assert who.heard == []


@pytest.mark.parametrize(
    "subject",
    [
        "mesh.v1.in.spy",
        "mesh.v1.all.gateway",
        "_MESH_INBOX.spy",
        "_INBOX.spy",
        "$SRV.PING",
        "$JS.API.INFO",
        "shoal.v1.events.tokens.other",
    ],
)
async def test_the_public_account_cannot_speak_inside(nats_server: Server, subject: str) -> None:
    """Refused, and nobody inside hears it."""
    async with gateway(nats_server) as bus, outsider(nats_server) as who:
        heard: list[Delivery] = []
        await bus.subscribe(subject, heard.append)
        await who.client.publish(subject, b"evil")
        await eventually(lambda: len(who.refused) == 1)
        assert "permissions violation for publish" in who.refused[0]
        await bus.flush()
        assert heard == []


async def test_events_are_heard_by_both_accounts(nats_server: Server) -> None:
    async with gateway(nats_server) as bus, outsider(nats_server) as who:
        await who.client.subscribe("shoal.v1.events.>", cb=who.note)
        await who.settle()
        bus.publish("shoal.v1.events.health", b"{}")
        await eventually(lambda: who.heard == [("shoal.v1.events.health", b"{}")])


async def test_a_stranger_is_refused(nats_server: Server) -> None:
    """No credentials, no connection; and a public user is not an internal one."""
    for user, password in (("", ""), (nats_server.public_user, nats_server.password)):
        with pytest.raises(Unavailable):
            await NatsBus.connect(nats_server.url, user, password, name="x", timeout_s=0.2)
