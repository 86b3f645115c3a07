"""The gateway actor: sessions, and the two edges through which requests come in."""

import asyncio
import contextlib
import random
from typing import Any

from msgspec.structs import replace

from services.gateway.bus_edge import BusEdge
from services.gateway.calls import Calls
from services.gateway.config import GatewayConfig
from services.gateway.edge import Edge, Parts
from services.gateway.http import HttpEdge
from services.gateway.meters import Meter
from services.gateway.sessions import Limits, SessionTable
from services.gateway.stored.executor import Executor
from services.gateway.stored.store import Store
from services.gateway.view import MeshView
from shared.actor import Actor
from shared.bus import Bus
from shared.clock import Clock, monotonic
from shared.config import Launch, Status, settings
from shared.errors import Unavailable
from shared.log import log
from shared.messages import Beat, ToGateway
from shared.process import run_service
from shared.subjects import DIED, beacon, beat

KEPT_S = 5.5  # clients keep an unused connection for 5 s; who closes it sooner may cut a request
LOOK_S = 0.05
LAST_WORDS_S = 1.0  # for readers that are told that their stream ends here


class Gateway(Actor):
    """Owns the sessions it accepted; they end with this process."""

    role = "gateway"
    mailbox = ToGateway

    def __init__(
        self, launch: Launch, bus: Bus, config: GatewayConfig, clock: Clock = monotonic
    ) -> None:
        self.table = SessionTable(
            launch.instance,
            launch.pool,
            random.Random(),  # noqa: S311 seeds of samplers, not secrets
            Limits(sessions=config.sessions_max),
        )
        super().__init__(launch, bus, self.table, clock)
        self.config = config
        self.drain_s = config.drain_s
        self.calls = Calls(self.table.outbox, self.table.choose_tokenizer, config.sessions_max)
        self.view = MeshView()
        self.store = Store(bus, config.stored)
        self.edge = Edge(
            launch,
            config,
            Parts(
                table=self.table,
                calls=self.calls,
                view=self.view,
                store=self.store,
                clock=clock,
                flush=self.flush,
                stats=self.stats,
                connected=lambda: bus.connected,
            ),
            Meter(launch.model_name, launch.name),
        )
        self.http = HttpEdge(self.edge)
        self.bus_edge = BusEdge(self.edge, bus)
        self.executor = Executor(self.edge, bus, launch.instance)

    def subjects(self) -> list[str]:
        return [beat("tokenizer"), beat("gpu_worker"), beacon(self.launch.pool), DIED]

    def receive(self, message: Any, now: float) -> None:
        self.view.receive(message, now)
        if not self.calls.receive(message):
            self.table.receive(message, now)

    def tick(self, now: float) -> None:
        self.view.tick(now)
        self.calls.tick(now)
        self.table.tick(now)
        self.executor.tick(now)

    def on_disconnected(self, now: float) -> None:
        self.table.connection_lost(now)

    def on_reconnected(self, now: float) -> None:
        self.view.restart(now)
        self.calls.restart(now)
        self.table.reconnected(now)

    def stats(self) -> dict[str, int]:
        redrives = {f"redrive_{cause}": count for cause, count in self.table.redrives.items()}
        return super().stats() | redrives | self.store.counters | self.executor.counters

    def beat(self) -> Beat:
        return replace(super().beat(), load=self.table.num_sessions, term=self.table.leading.term)

    def status(self) -> Status:
        why = self.edge.not_ready() if self.ready else ""
        return replace(
            super().status(),
            load=self.table.num_sessions,
            detail=why or self.detail,
            extra={"port": self.http.port},
        )

    async def on_ready(self) -> None:
        await self.http.start(self.launch.listen_fd)
        await self.bus_edge.start()
        self.store.start()
        self.executor.start()
        log.info("listening", port=self.http.port)

    async def drain(self) -> None:
        """Take no new connection; what runs, or still comes on those that are open, may end."""
        self.edge.draining = True
        await self.http.stop_listening()
        await self.bus_edge.stop_listening()
        await self.executor.stop_taking()
        seen, until = -1, 0.0
        while self.http.connections and (seen != self.http.requests or self.clock() < until):
            if seen != self.http.requests:
                seen, until = self.http.requests, self.clock() + KEPT_S
            await asyncio.sleep(LOOK_S)
            await self.edge.idle.wait()
        await self.bus_edge.idle()
        await self.edge.idle.wait()

    async def last_words(self) -> None:
        await self.executor.hand_over()
        self.edge.fail_all(Unavailable("This gateway is stopping.", retry_after_s=1.0))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self.edge.idle.wait()

    async def on_stop(self) -> None:
        await self.executor.hand_over()
        await self.store.close()
        await self.http.close()
        await self.bus_edge.close()


def make(launch: Launch, bus: Bus) -> Gateway:
    """The gateway that `launch` describes; raises `ConfigError`."""
    return Gateway(launch, bus, settings(launch.settings, GatewayConfig, "gateway"))


def main(launch: Launch) -> None:
    """Run until stopped."""
    run_service(launch, make)
