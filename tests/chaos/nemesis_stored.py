"""A store without room, and requests that are the end of whoever reads them."""

import contextlib
import os
import secrets
import signal

import aiohttp

from deploy import control
from shared.jetstream import JetStream, StreamFull
from shared.subjects import stored
from tests.chaos.asks import lethal
from tests.chaos.nats_proxy import LethalRule
from tests.chaos.nemesis import Field, NotInjected
from tests.chaos.nemesis_clients import DEATHS_MAX
from tests.chaos.nemesis_net import SUBJECTS
from tests.chaos.site import Site

LOGS = "stored"  # the stream
JUNK = stored("f" * 32)  # a log that nobody reads
PIECES = (1 << 20, 1 << 14, 256)  # bytes: to the brim, and not one by one


class StoreFull:
    """JetStream takes no more of the logs of stored requests."""

    def __init__(self) -> None:
        self._jetstream: JetStream | None = None

    async def inject(self, field: Field) -> str:
        self._jetstream = jetstream = JetStream(field.site.bus)
        last = filled = 0
        for size in PIECES:
            with contextlib.suppress(StreamFull):
                while True:
                    last = await jetstream.append(JUNK, bytes(size), last)
                    filled += size
        return f"{filled} bytes of junk; {await _refused(field)}"

    async def heal(self) -> None:
        if self._jetstream is not None:
            await self._jetstream.purge(LOGS, JUNK)


async def _refused(field: Field) -> str:
    """How a new stored request is refused; raises `NotInjected` if it is not."""
    body = {"model": field.site.mesh.model, "input": "Is there room?", "max_output_tokens": 1}
    url = f"{field.site.mesh.base_url}/v1/responses"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        said = (await answer.text())[:200]
        if answer.status != 503 or "Retry-After" not in answer.headers:
            raise NotInjected(f"a new stored request is not refused: {answer.status} {said}")
        return f"a new stored request is refused: {said}"


class Lethal:
    """A request that ends each process of `role` that is sent it, before it reads anything else.

    None of our services can be ended so by anything that a client may say, so the proxy takes the
    message away and its reader is killed.
    """

    def __init__(self, role: str) -> None:
        self._role = role
        self._site: Site | None = None
        self._ended: set[str] = set()

    async def inject(self, field: Field) -> str:
        self._site = field.site
        marker = f"lethal{secrets.token_hex(4)}"
        field.site.nats.rule = LethalRule(SUBJECTS[self._role], marker.encode(), self._end)
        await field.clients.ask(lethal(self._role, marker))
        if not 1 <= len(self._ended) <= DEATHS_MAX:
            raise NotInjected(f"{len(self._ended)} of {self._role} died, not 1 to {DEATHS_MAX}")
        return f"{len(self._ended)} of {self._role} died"

    async def heal(self) -> None:
        if self._site is not None:
            self._site.nats.rule = None

    def _end(self, instance: str) -> None:
        """Asked in the loop, for milliseconds: nothing passes the proxy before it is gone."""
        assert self._site is not None
        for process in control.status(self._site.run_dir).processes:
            if process.instance == instance and process.pid:
                os.killpg(process.pid, signal.SIGKILL)
                self._ended.add(instance)
