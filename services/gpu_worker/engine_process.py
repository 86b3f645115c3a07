"""The engine as its I/O process sees it: a child, a stream of frames, a page of numbers."""

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from typing import cast

import msgspec

from services.gpu_worker.config import EX_CONFIG, EngineLaunch, WorkerConfig
from services.gpu_worker.frames import FrameReader, Kind, command, parse_publication
from services.gpu_worker.status_page import EngineStatus, StatusPage, create
from shared.config import ConfigError, Launch
from shared.errors import Unavailable

_EXIT_S = 2.0  # for an engine to say its last words

Publish = Callable[[str, bytes], None]


class EngineProcess(asyncio.Protocol):
    """Starts the engine, forwards bytes both ways undecoded, and knows when it is gone."""

    def __init__(self, launch: Launch, config: WorkerConfig, publish: Publish) -> None:
        self._launch = launch
        self._config = config
        self._publish = publish
        self._frames = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._page: StatusPage | None = None
        self._closed = asyncio.Event()  # all that the engine sent has been read

    async def start(self) -> None:
        """Start the process; `status` tells when it is ready."""
        ours, theirs = socket.socketpair()
        page_fd = create()
        try:
            argument = EngineLaunch(
                instance=self._launch.instance,
                model=self._launch.model,
                config=self._config,
                channel_fd=theirs.fileno(),
                page_fd=page_fd,
                parent_pid=os.getpid(),
            )
            self._page = StatusPage(page_fd)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.gpu_worker.engine",
                msgspec.json.encode(argument).decode(),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), page_fd),
            )
        finally:
            theirs.close()
            os.close(page_fd)
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self, sock=ours)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def status(self) -> EngineStatus:
        return self._page.read() if self._page is not None else EngineStatus()

    async def wait(self) -> ConfigError | Unavailable:
        """Return when the engine has ended; why. `ConfigError`: so would the next one."""
        assert self._process is not None
        code = await self._process.wait()
        detail = self.status().detail
        if code == EX_CONFIG:
            return ConfigError(detail)
        return Unavailable(f"engine ended with status {code}" + (f": {detail}" if detail else ""))

    def kill(self) -> None:
        """End an engine that does not listen any more."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def end(self) -> None:
        """Let the engine move its legs elsewhere and exit; what it says is still published."""
        if self._process is None:
            return
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()
        try:
            async with asyncio.timeout(_EXIT_S):
                await self._closed.wait()
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def close(self) -> None:
        """Kill what is left and give back the page."""
        self.kill()
        if self._transport is not None:
            self._transport.close()

    def send(self, kind: Kind, payload: bytes = b"") -> bool:
        """Queue one frame; never blocks. False = dropped, because the engine is too far behind."""
        if self._transport is None or self._transport.is_closing():
            return False
        if self._transport.get_write_buffer_size() > self._config.inbound_bytes_max:
            return False
        self._transport.write(command(kind, payload))
        return True

    # --- bytes from the engine (asyncio.Protocol) ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            self._publish(*parse_publication(body))

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 asyncio's signature
        self._closed.set()
