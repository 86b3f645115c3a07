"""Two gateways on a real NATS server, before one played mesh."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from deploy.servers import Server
from services.gateway.config import GatewayConfig
from services.gateway.service import Gateway
from services.gateway.stored.config import StoredConfig
from services.gateway.stored.events import Adopted, Ended, Output, Submitted
from services.gateway.stored.store import Logged, Store
from services.gateway.stored.streams import JOBS, LOGS
from shared.config import Launch
from shared.nats_bus import NatsBus
from shared.subjects import job, stored
from shared.testing import eventually, running
from tests.services.gateway.fake_mesh import MODEL, FakeMesh
from tests.services.gateway.stored.kit import R, follow, submitted

QUICK = StoredConfig(ack_wait_s=1.0, working_s=0.3, poll_s=0.2, pull_s=0.5)
TEXT = "Hello, world!"


def chat(timeout_s: float = 60.0, **fields: object) -> Submitted:
    """A chat request as a client would send it."""
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}
    return submitted(body=msgspec.json.encode(asked), timeout_s=timeout_s)


@dataclass
class Duo:
    """`gateways` serve; a test stops them as it likes."""

    gateways: list[Gateway]
    mesh: FakeMesh

    @property
    def store(self) -> Store:
        return self.gateways[0].store

    async def ask(self, asked: Submitted, request_id: str = R) -> None:
        await self.store.submit(request_id, asked, keyed=False)

    async def under_way(self, request_id: str = R) -> Gateway:
        """Wait until some of the answer is logged; the gateway that runs it."""
        async for logged in self.store.follow(request_id, "t"):
            if isinstance(logged.event, Output):
                break
        log = await self.store.look(request_id, "t")
        return next(g for g in self.gateways if g.instance == log.adopter)

    def count(self, name: str) -> int:
        """A counter, of both together."""
        return sum(gateway.stats().get(name, 0) for gateway in self.gateways)


@asynccontextmanager
async def duo(server: Server, config: StoredConfig = QUICK, **settings: Any) -> AsyncIterator[Duo]:
    """Both ready, and nothing stored."""
    async with AsyncExitStack() as stack:

        async def bus(name: str) -> NatsBus:
            bus = await NatsBus.connect(server.url, server.user, server.password, name=name)
            stack.push_async_callback(bus.close)
            return bus

        buses = [await bus(name) for name in ("a", "b", "mesh")]
        mesh = await stack.enter_async_context(FakeMesh(buses.pop()).up())
        gateways = [
            Gateway(launch(name), bus, GatewayConfig(stored=config, **settings))
            for name, bus in zip("ab", buses, strict=True)
        ]
        for gateway in gateways:
            await stack.enter_async_context(running(gateway))
        for gateway in gateways:
            await eventually(lambda g=gateway: not (g.edge.not_ready() or g.store.why_not))  # type: ignore[misc]
        jetstream = gateways[0].store.jetstream
        await jetstream.purge(LOGS, stored())
        await jetstream.purge(JOBS, job())
        yield Duo(gateways, mesh)


def launch(name: str) -> Launch:
    return Launch(
        role="gateway",
        name=f"gateway-{name}",
        instance=f"gateway-{name}-x",
        model_name=MODEL,
        nats_url="",
        nats_user="",
        nats_password="",
        secret="00" * 16,
        run_dir="",
    )


def check(log: list[Logged]) -> None:
    """What is true of every log that has ended: one beginning, one end, and the ids of each choice
    once and in order, whoever ran it.
    """
    events = [logged.event for logged in log]
    assert isinstance(events[0], Submitted)
    assert [e for e in events if isinstance(e, Ended)] == [events[-1]]
    assert sum(isinstance(e, Submitted) for e in events) == 1
    lengths: dict[int, int] = {}
    adopted = False
    for event in events:
        adopted = adopted or isinstance(event, Adopted)
        if isinstance(event, Output):
            assert adopted
            for piece in event.pieces:
                assert piece.index == lengths.get(piece.choice, 0)
                lengths[piece.choice] = piece.index + len(piece.ids) // 4


def texts(log: list[Logged]) -> dict[int, str]:
    """The text of each choice."""
    told: dict[int, str] = {}
    for _, event in log:
        if isinstance(event, Output):
            for piece in event.pieces:
                told[piece.choice] = told.get(piece.choice, "") + piece.text
    return told


def ended(log: list[Logged]) -> Ended:
    event = log[-1].event
    assert isinstance(event, Ended)
    return event


async def whole(duo: Duo, request_id: str = R) -> list[Logged]:
    """The log once it has ended, checked."""
    log = await follow(duo.store, request_id=request_id)
    check(log)
    return log
