"""A stream proxy in the test's own loop, that shows and breaks what flows through it.

It listens on a loopback port or a unix socket and forwards to one server. `Weather` is what it does
to bytes while it lasts, also to connections made meanwhile.
"""

import asyncio
import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

CHUNK = 65536
Direction = Literal["sent", "received"]
"""`sent` = from clients to the server."""


class Link:
    """One connection through a proxy; `name` is for subclasses that know who connects."""

    def __init__(self, client: asyncio.StreamWriter) -> None:
        self.name = ""
        self.client = client
        self.server: asyncio.StreamWriter | None = None

    def abort(self) -> None:
        """Reset both ends."""
        for writer in (self.client, self.server):
            if writer is not None:
                writer.transport.abort()


class Weather:
    """What happens to bytes of the links whose name begins with `prefix`, until `clear`."""

    def __init__(
        self,
        prefix: str = "",
        *,
        latency_s: float = 0.0,
        held: Iterable[Direction] = (),
        cuts: int = 0,
    ) -> None:
        self.prefix = prefix
        self.latency_s = latency_s  # each piece waits so long; what follows it waits behind it
        self.held = frozenset(held)  # nothing passes; what came flows on when it clears
        self.cuts = cuts  # so many times, half of a piece passes and then the link is reset
        self.touched = 0  # bytes that met it
        self._over = asyncio.Event()

    def clear(self) -> None:
        self.cuts, self.latency_s = 0, 0.0
        self._over.set()

    async def meet(self, link: Link, direction: Direction, data: bytes) -> bytes:
        """What is left of `data`, when it may pass. Raises `ConnectionResetError` after a cut."""
        if self._over.is_set() or not link.name.startswith(self.prefix):
            return data
        if direction in self.held:
            self.touched += len(data)
            await self._over.wait()
        if self.latency_s:
            self.touched += len(data)
            await asyncio.sleep(self.latency_s)
        if self.cuts and len(data) > 1:
            self.cuts -= 1
            self.touched += len(data)
            return data[: len(data) // 2]
        return data


class Proxy:
    """`sent` = bytes of clients, `received` = bytes of the server, over all links, if `record`."""

    def __init__(self, url: str, *, listen: str = "", record: bool = True) -> None:
        """`url`: where to forward to, with a port or a path; `listen`: where, "" = any port."""
        self._target = urlsplit(url)
        self._listen = urlsplit(listen)
        self._record = record
        self.sent = bytearray()
        self.received = bytearray()
        self.dribble = False  # forward what clients send line by line, 5 ms apart
        self.weather = Weather()
        self.weather.clear()
        self.links: set[Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.url = ""

    async def __aenter__(self) -> "Proxy":
        if self._listen.path:
            self._server = await asyncio.start_unix_server(self._serve, self._listen.path)
            self.url = f"unix://{self._listen.path}"
        else:
            port = self._listen.port or 0
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
            self.url = f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_error: object) -> None:
        assert self._server is not None
        self._server.close()
        self.weather.clear()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listen.path:
            Path(self._listen.path).unlink(missing_ok=True)

    def cut(self, prefix: str = "") -> int:
        """Reset every link whose name begins with `prefix`; how many."""
        hit = [link for link in self.links if link.name.startswith(prefix)]
        for link in hit:
            link.abort()
        return len(hit)

    def pieces(self, link: Link, data: bytes) -> Iterable[bytes]:  # noqa: ARG002 for subclasses
        """What a client sent, as it is to be forwarded."""
        return data.splitlines(keepends=True) if self.dribble else [data]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        link = Link(writer)
        self.links.add(link)
        try:
            with contextlib.suppress(OSError):
                upstream, link.server = await self._connect()
                await asyncio.gather(
                    self._pump(link, reader, link.server, "sent"),
                    self._pump(link, upstream, writer, "received"),
                )
        finally:
            self.links.discard(link)
            link.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._target.path:
            return await asyncio.open_unix_connection(self._target.path)
        return await asyncio.open_connection(self._target.hostname, self._target.port)

    async def _pump(
        self,
        link: Link,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        direction: Direction,
    ) -> None:
        """Forward to the end; whatever ends one direction closes the other end."""
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                if self._record:
                    (self.sent if direction == "sent" else self.received).extend(data)
                for piece in self.pieces(link, data) if direction == "sent" else [data]:
                    passed = await self.weather.meet(link, direction, piece)
                    if writer.is_closing():
                        return
                    writer.write(passed)
                    await writer.drain()
                    if passed is not piece:  # cut: let the half go out first
                        await asyncio.sleep(0.01)
                        link.abort()
                        return
                    if self.dribble and direction == "sent":
                        await asyncio.sleep(0.005)
        writer.close()
