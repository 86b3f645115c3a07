"""A TCP proxy in the test's own loop, that shows and breaks what flows through it."""

import asyncio
import contextlib
from urllib.parse import urlsplit


class Proxy:
    """`sent` = bytes of clients, `received` = bytes of the server, over all connections."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._target = (parts.hostname, parts.port)
        self.sent = bytearray()
        self.received = bytearray()
        self.dribble = False  # forward what clients send line by line, 5 ms apart
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.url = ""

    async def __aenter__(self) -> "Proxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_error: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Reset every connection."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        with contextlib.suppress(OSError):
            upstream, onward = await asyncio.open_connection(*self._target)
            self._writers.add(onward)
            await asyncio.gather(
                self._pump(reader, onward, self.sent), self._pump(upstream, writer, self.received)
            )

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: bytearray
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                seen += data
                slow = self.dribble and seen is self.sent
                for part in data.splitlines(keepends=True) if slow else [data]:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0.005 if slow else 0)
        writer.close()
