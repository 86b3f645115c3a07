"""The supervisor's unix socket (0600): one JSON line asked, one answered.

Before the answer to what takes its time come notes on how far it is, and empty lines that say that
the supervisor is still at it.
Whoever may open it may stop the cluster, so it lies in the run directory and nowhere else.
"""

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec
from msgspec import Struct

from deploy.errors import ClusterError

LINE_MAX = 1 << 20  # bytes of one answer; a process takes about 200
ASK_TIMEOUT_S = 5.0
AT_IT_S = 1.0  # between two lines of a supervisor that is at work
Verb = Literal["status", "kill", "pause", "resume", "down", "scale", "rolling"]


class Command(Struct, frozen=True, forbid_unknown_fields=True):
    """What a person asks of the supervisor."""

    verb: Verb
    name: str = ""  # of a process: gpu_worker-0; of a role, for `scale`
    count: int = 0  # for `scale`
    names: list[str] = []  # of processes or roles, for `rolling`; none = all


class ProcessStatus(Struct, frozen=True):
    """One row of `shoal status`."""

    name: str
    state: str
    pid: int
    instance: str
    load: int
    restarts: int
    uptime_s: float
    detail: str
    extra: dict[str, int | str] = {}


class ClusterStatus(Struct, frozen=True):
    """The answer to `status`."""

    state: str  # starting, ready, degraded (a process was given up), stopping
    supervisor_pid: int
    host: str
    port: int
    model: str
    drain_s: float  # running answers may take so long to end after `down`
    nats_url: str
    run_dir: str
    processes: list[ProcessStatus]


class Answer(Struct, frozen=True, omit_defaults=True):
    """`error` is a sentence for the person who asked; after a `note` more is to come."""

    error: str = ""
    note: str = ""
    status: ClusterStatus | None = None


Tell = Callable[[str], None]
Handler = Callable[[Command, Tell], Awaitable[Answer]]


@contextlib.contextmanager
def short_path(run_dir: Path) -> Iterator[str]:
    """The socket's path, short enough for the kernel (107 bytes) however deep `run_dir` is."""
    fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/control.sock"
    finally:
        os.close(fd)


async def serve(run_dir: Path, handle: Handler) -> asyncio.Server:
    """Listen in `run_dir` until the returned server is closed."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, ValueError, TimeoutError):  # they went away
            async with asyncio.timeout(ASK_TIMEOUT_S):
                line = await reader.readline()
            try:
                command = msgspec.json.decode(line, type=Command)
            except msgspec.MsgspecError as error:
                reply = Answer(error=f"Not a command: {error}.")
            else:
                reply = await _at_it(handle, command, reader, writer)
            writer.write(msgspec.json.encode(reply) + b"\n")
            await writer.drain()
            await reader.read()  # until they close
        writer.close()

    listener = socket.socket(socket.AF_UNIX)
    with short_path(run_dir) as path:
        listener.bind(path)
    (run_dir / "control.sock").chmod(0o600)
    return await asyncio.start_unix_server(answer, sock=listener, limit=LINE_MAX)


async def _at_it(
    handle: Handler, command: Command, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> Answer:
    """The answer of `handle`; what it tells goes out at once. When the asker has gone, telling
    raises `ConnectionError`.
    """

    def tell(note: str) -> None:
        if reader.at_eof():
            raise ConnectionResetError("nobody listens any more")
        writer.write(msgspec.json.encode(Answer(note=note)) + b"\n")

    work = asyncio.ensure_future(handle(command, tell))
    while not work.done():
        await asyncio.wait({work}, timeout=AT_IT_S)
        if not work.done() and not reader.at_eof():
            writer.write(b"\n")
    return work.result()


def ask(run_dir: Path, command: Command, tell: Tell = lambda _note: None) -> Answer:
    """Ask the supervisor of `run_dir`, `tell` what it says meanwhile.

    Raises `ClusterError` when none answers or it refuses.
    """
    pid = 0
    try:
        with short_path(run_dir) as path, socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ASK_TIMEOUT_S)
            connection.connect(path)
            pid = peer(connection)
            connection.sendall(msgspec.json.encode(command) + b"\n")
            with connection.makefile("rb") as lines:
                answer = _last(lines, tell)
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
        raise NotUp(f"No mesh is up in {run_dir}; `shoal up` starts one.") from None
    except TimeoutError:
        raise Unresponsive(f"The supervisor of {run_dir} does not answer.", pid) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise Unresponsive(f"The supervisor of {run_dir} broke off: {error}.", pid) from error
    if answer.error:
        raise ClusterError(answer.error)
    return answer


def _last(lines: BinaryIO, tell: Tell) -> Answer:
    while True:
        line = lines.readline(LINE_MAX)
        if line == b"\n":
            continue
        answer = msgspec.json.decode(line, type=Answer)
        if not answer.note:
            return answer
        tell(answer.note)


def status(run_dir: Path) -> ClusterStatus:
    """What runs in `run_dir`."""
    answer = ask(run_dir, Command("status")).status
    assert answer is not None
    return answer


class NotUp(ClusterError):
    """No supervisor listens."""


class Unresponsive(ClusterError):
    """A supervisor is there and does not answer."""

    def __init__(self, sentence: str, pid: int) -> None:
        super().__init__(sentence)
        self.pid = pid


def peer(connection: socket.socket) -> int:
    """Pid of who listens at the other end; the kernel knows even when it is stopped."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid: int = struct.unpack("3i", credentials)[0]
    return pid


def as_json(status: ClusterStatus) -> str:
    """For programs."""
    return msgspec.json.format(msgspec.json.encode(status)).decode()


def as_table(status: ClusterStatus) -> str:
    """For people."""
    rows = [("NAME", "STATE", "PID", "LOAD", "RESTARTS", "UPTIME", "DETAIL")]
    for p in status.processes:
        uptime = f"{p.uptime_s:.0f} s" if p.pid else ""
        pid = str(p.pid) if p.pid else ""
        rows.append((p.name, p.state, pid, str(p.load), str(p.restarts), uptime, p.detail))
    head = f"{status.model} at http://{status.host}:{status.port}/v1, {status.state}"
    return "\n".join([head, *aligned(rows)])


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines whose columns stand below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
