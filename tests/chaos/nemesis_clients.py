"""What clients can do to a mesh: a request that breaks the engine, leaving, and not reading."""

import asyncio
import json
import socket
from collections import Counter
from urllib.parse import urlsplit

from tests.chaos.asks import poison
from tests.chaos.nemesis import Field, NotInjected, proven
from tests.chaos.site import POISON

FAULTS = {"nan": "nan_logits", "raise": "raised", "oom": "out_of_memory"}
"""What the engine counts of each kind that it survives."""

DEATHS_MAX = 3  # that one poison request may cost
LEAVERS = 8
LEAVE_S = 10.0  # for the gateways to notice
SCRAPES = 8  # each meets one of two gateways
CUT_S = 40.0  # for a gateway to give up a reader: its write timeout, and what fills the buffers


class Poison:
    """A request that does `kind` to the engine that runs it; it alone is to fail."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    async def inject(self, field: Field) -> str:
        deaths, faults = await _restarts(field), await self._faults(field)
        await field.clients.ask(poison(self._kind, POISON[self._kind]))
        deaths = await _restarts(field) - deaths
        if self._kind == "crash":
            if not 1 <= deaths <= DEATHS_MAX:
                raise NotInjected(f"{deaths} workers died, not 1 to {DEATHS_MAX}")
            return f"{deaths} workers died"
        if deaths:
            raise NotInjected(f"{deaths} workers died")

        async def failed() -> str:  # a busy engine shows its counters now and then
            count = await self._faults(field) - faults
            return f"{count} legs failed of it, no worker died" if count > 0 else ""

        return await proven(failed, "a leg that failed of it")

    async def _faults(self, field: Field) -> int:
        """How often the workers that live have counted it."""
        counters = await field.site.counters("gpu_worker")
        return counters[f"engine_fault_{FAULTS.get(self._kind, '')}"]

    async def heal(self) -> None:
        """The request has ended."""


class Leave:
    """Many clients close their connections in the middle of their answers."""

    async def inject(self, field: Field) -> str:
        before = (await field.site.counters("gateway"))["end_cancelled"]
        asks = [ask for ask in field.asks if ask.way == "stream"][:LEAVERS]
        await asyncio.gather(*(field.clients.ask(ask, leave_after=3) for ask in asks))

        async def cancelled() -> str:
            count = (await field.site.counters("gateway"))["end_cancelled"] - before
            return f"{count} requests cancelled" if count >= LEAVERS else ""

        return await proven(cancelled, f"{LEAVERS} requests cancelled", LEAVE_S)

    async def heal(self) -> None:
        """They are gone."""


class Stall:
    """A client that asks for megabytes and does not read them: its gateway cuts it off."""

    async def inject(self, field: Field) -> str:
        before = await _cuts(field)
        url = urlsplit(field.site.mesh.base_url)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (url.hostname, url.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
        try:
            writer.write(stalling_request(url.netloc))
            await writer.drain()
            if b" 200 " not in await reader.readline():
                raise NotInjected("the stalling client was refused")
            # A limit of 4 KB: the reader stops the transport, the kernel's buffer fills, and so on.
            return await _seen_cut(field, before)
        finally:
            writer.transport.abort()

    async def heal(self) -> None:
        """It was cut off."""


def stalling_request(host: str) -> bytes:
    """Eight streams in one, each with the longest logprobs there are: some 10 KB a step."""
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "Say a lot."}],
            "n": 8,
            "max_tokens": 400,
            "temperature": 1,
            "logprobs": True,
            "top_logprobs": 20,
            "stream": True,
            "ignore_eos": True,
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + body


async def _seen_cut(field: Field, before: Counter[str]) -> str:
    """Wait until a gateway has counted it: what is cut with full buffers hears nothing of it."""
    try:
        async with asyncio.timeout(CUT_S):
            while True:
                for gateway, count in (await _cuts(field)).items():
                    if count > before[gateway]:
                        return f"{gateway} cut the connection"
                await asyncio.sleep(0.5)
    except TimeoutError:
        raise NotInjected(f"not cut off within {CUT_S:g} s") from None


async def _cuts(field: Field) -> Counter[str]:
    """Readers cut off for not reading, by gateway; whichever gateways happen to answer."""
    cuts: Counter[str] = Counter()
    for _ in range(SCRAPES):
        for line in (await field.site.mesh.metrics_text()).splitlines():
            name, _, count = line.rpartition(" ")
            if name.startswith("shoal:clients_cut_total{") and 'why="write_timeout"' in name:
                cuts[name] = int(float(count))
    return cuts


async def _restarts(field: Field) -> int:
    """How often workers were started again."""
    return sum(
        process.restarts
        for process in await field.site.status()
        if process.name.startswith("gpu_worker")
    )
