"""An answer on its way to an inbox: written in frames while somebody listens there."""

import asyncio
from collections.abc import AsyncIterator

from services.gateway.config import GatewayConfig
from services.gateway.edge import Open
from services.gateway.events import Delta, SessionEnd
from services.gateway.frames import Frames
from services.gateway.meters import Meter
from services.gateway.openai.answer import Answer
from services.gateway.openai.request import Checked
from shared.bus import Bus
from shared.errors import DeadlineExceeded, Unavailable

ABSENT_MAX = 2  # probes in a row with nobody there

Events = AsyncIterator[list[Delta | SessionEnd]]


async def live(asked: Open) -> Events:
    """The events of an open request, as they come."""
    while True:
        yield await asked.feed.take(asked.config.ping_bus_s)


class Delivering:
    """One answer, from wherever its events come."""

    def __init__(self, checked: Checked, answer: Answer, frames: Frames, bus: Bus) -> None:
        self._checked = checked
        self._answer = answer
        self._frames = frames
        self._bus = bus

    async def run(self, events: Events, config: GatewayConfig, meter: Meter) -> None:
        """Deliver to the end; raises `MeshError` of the session, or when nobody listens."""
        tasks = {
            asyncio.create_task(self._deliver(events)),
            asyncio.create_task(self._probe(config, meter)),
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _deliver(self, events: Events) -> None:
        async for batch in events:
            for event in batch:
                if isinstance(event, Delta):
                    self._add(event)
                else:
                    self._end(event)
                    return

    def _add(self, delta: Delta) -> None:
        if not self._checked.stream:
            self._answer.add(delta)
            return
        for chunk in self._answer.chunks(delta):
            self._frames.put("chunk", chunk)

    def _end(self, end: SessionEnd) -> None:
        if end.error is not None:
            raise end.error
        if not self._checked.stream:
            self._frames.put("chunk", self._answer.body(end))
        elif self._checked.include_usage:
            self._frames.put("chunk", self._answer.usage_chunk(end))
        self._frames.end()

    async def _probe(self, config: GatewayConfig, meter: Meter) -> None:
        """Ask once a second whether anybody listens; raises `Unavailable` when nobody does."""
        absent = 0
        while True:
            await asyncio.sleep(config.ping_bus_s)
            try:
                await self._bus.request(self._frames.inbox, b"", config.probe_timeout_s)
                absent = 0
            except DeadlineExceeded:
                absent = 0  # somebody listens and need not answer
            except Unavailable:
                absent = absent + 1 if self._bus.connected else 0
            if absent >= ABSENT_MAX:
                meter.cut("nobody_listens")
                raise Unavailable("Nobody listens at the inbox.")
