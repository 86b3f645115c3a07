"""One child process: started so that it dies with us, heard on its status pipe, started again."""

import asyncio
import contextlib
import os
import random
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from deploy.errors import ClusterError
from deploy.restart import RestartPolicy, Restarts, Silence, SilencePolicy
from deploy.servers import Server, die_with_parent
from shared.config import Status
from shared.log import log

EX_CONFIG = 78
"""Exit status of a process whose settings are wrong: to start it again would not help."""

NOT_STARTED = "cannot be started"
"""How the reason begins when the machine refused: a full disk, no more processes."""

STATUS_LINE_MAX = 65536  # bytes; a child that writes longer lines is not ours
PROBE_S = 0.02  # between two questions whether a server is ready
PING_S = 1.0  # and whether it still answers

State = Literal["starting", "ready", "draining", "paused", "backoff", "failed", "stopped"]


class Command(Struct, frozen=True):
    """How to start one run of a child."""

    argv: list[str]
    env: Mapping[str, str]
    pass_fds: tuple[int, ...] = ()


class ChildSpec(Struct, frozen=True):
    """A child that is always to be there."""

    name: str  # gpu_worker-0
    role: str
    log: Path
    command: Callable[[str, int], Command]  # instance, status fd -> how to start it
    ordinal: int = 0  # among those of its role
    server: Server | None = None  # does not speak, is asked; None = speaks in `Status` lines
    restart: RestartPolicy = RestartPolicy()
    silence: SilencePolicy = SilencePolicy()
    hurry_s: float = 5.0  # from the second SIGTERM, which says that time is up, to SIGKILL


class Child:
    """Keeps one child running. All on the loop of the main thread: PDEATHSIG fires when the
    *thread* that forked ends.
    """

    def __init__(
        self,
        spec: ChildSpec,
        died: Callable[["Child", str], None],
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self.instance = ""
        self.pid = 0
        self.state: State = "stopped"
        self.reason = ""  # of its last end
        self.status = Status(state="starting")
        self.started = 0.0
        self.silence = Silence(spec.silence, clock())
        self.restarts = Restarts(spec.restart, random.Random())  # noqa: S311 jitter
        self._died = died
        self._changed = changed
        self._clock = clock
        self._kill_reason = ""
        self._asked = False  # its end was
        self._stopping = asyncio.Event()
        self._gone = asyncio.Event()
        self._gone.set()
        self._buffer = b""

    # --- life ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Start, and start again, until `stop` or until it is given up."""
        while not self._stopping.is_set():
            self.reason = await self._once()
            if self._stopping.is_set():
                break
            self._died(self, self.reason)
            delay = None
            if self._asked:
                delay = self.restarts.asked()
            elif self.reason != f"exit {EX_CONFIG}":
                delay = self.restarts.next_delay(self._clock())
            if delay is None and self.started and self.reason.startswith(NOT_STARTED):
                delay = self.spec.restart.cap_s  # it has run here; a disk is not full for ever
            if delay is None:
                log.error("given_up", child=self.spec.name, reason=self.reason)
                self._become("failed")
                return
            self._become("backoff")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._stopping.wait()
        self._become("stopped")

    async def stop(self, grace_s: float) -> None:
        """SIGTERM; after `grace_s` another one, and SIGKILL after `hurry_s` more. On return it is
        gone, whatever its state was.
        """
        self._stopping.set()
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)
        for patience_s, then in ((grace_s, signal.SIGTERM), (self.spec.hurry_s, signal.SIGKILL)):
            try:
                async with asyncio.timeout(patience_s):
                    await self._gone.wait()
            except TimeoutError:
                self.signal(then)
        await self._gone.wait()

    def signal(self, number: signal.Signals) -> None:
        """Signal the child; stop, continue and kill reach the processes that it started, too."""
        if not self.pid:
            return
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGTERM:
                os.kill(self.pid, number)
            else:
                os.killpg(self.pid, number)

    def kill(self, reason: str, *, asked: bool = False) -> None:
        """SIGKILL; from now on it does not count as running. `asked` = by a person: no crash."""
        self._kill_reason, self._asked = reason, asked
        self.signal(signal.SIGKILL)
        self._become("backoff")

    def pause(self) -> None:
        """SIGSTOP. Silence still counts, so a pause beyond the limit ends in a restart."""
        self.signal(signal.SIGSTOP)
        self._become("paused")

    def resume(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)
        if self.state == "paused":
            self._become("starting" if self.spec.server is None else "ready")

    def check_silence(self, now: float) -> None:
        """Kill it if it has been silent for too long."""
        if not self.pid or self._kill_reason:
            return
        limit = self.silence.too_long(now)
        if limit is not None:
            self.kill(f"silent for {limit:g} s")

    # --- one run ---------------------------------------------------------------------------------

    async def _once(self) -> str:
        """Start it and wait for its end; why it ended."""
        status_fd, child_end = os.pipe()
        os.set_blocking(status_fd, False)
        try:
            process = self._spawn(child_end)
        except (OSError, ClusterError) as error:  # also a launch file that cannot be written
            os.close(status_fd)
            return f"{NOT_STARTED}: {getattr(error, 'strerror', None) or error}"
        finally:
            os.close(child_end)
        loop = asyncio.get_running_loop()
        pidfd = os.pidfd_open(process.pid)
        ended = asyncio.Event()
        loop.add_reader(status_fd, self._hear, status_fd)
        loop.add_reader(pidfd, ended.set)
        probing = asyncio.create_task(self._probe(self.spec.server))
        try:
            await ended.wait()
        finally:
            probing.cancel()
            loop.remove_reader(pidfd)
            loop.remove_reader(status_fd)
            os.close(pidfd)
            os.close(status_fd)
            # Before it is reaped: its pid, and so its group, still belongs to it alone.
            self.signal(signal.SIGKILL)
            code = process.wait()
            self.pid = 0
            self.status = Status(state="starting")
            self._gone.set()
        return self._kill_reason or describe(code)

    def _spawn(self, child_end: int) -> "subprocess.Popen[bytes]":
        self.instance = f"{self.spec.name}-{secrets.token_hex(3)}"
        self._kill_reason, self._asked = "", False
        self._buffer = b""
        command = self.spec.command(self.instance, child_end)
        with self.spec.log.open("ab") as log:
            process = subprocess.Popen(
                command.argv,
                env=dict(command.env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(child_end, *command.pass_fds),
                start_new_session=True,
                preexec_fn=die_with_parent(),  # noqa: PLW1509 only system calls inside
            )
        self.pid = process.pid
        self._gone.clear()
        self.started = self._clock()
        self.silence = Silence(self.spec.silence, self.started)
        self.status = Status(state="starting")
        self._become("starting")
        return process

    async def _probe(self, server: Server | None) -> None:
        """Ask a child that does not speak: until it is ready, and then whether it still answers."""
        if server is None:
            return
        # Holds the loop for half a second at most, and only at a start.
        while not server.ready():  # noqa: ASYNC110 no event: it is another program
            await asyncio.sleep(PROBE_S)
        self.silence.heard(self._clock())
        self._become("ready")
        while True:
            await asyncio.sleep(PING_S)
            if await server.answers():
                self.silence.heard(self._clock())

    def _hear(self, status_fd: int) -> None:
        """Take what the child wrote on its status pipe."""
        try:
            data = os.read(status_fd, 65536)
        except BlockingIOError:
            return
        if not data:  # closed by the child; it will be killed for silence unless it ends
            asyncio.get_running_loop().remove_reader(status_fd)
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > STATUS_LINE_MAX:
            self._buffer = b""
        for line in lines[-1:]:  # a newer line says all that an older one did
            try:
                self.status = msgspec.json.decode(line, type=Status)
            except msgspec.MsgspecError:
                continue
            self.silence.heard(self._clock())
            if self.state not in {"paused", "backoff"}:  # it wrote this before it was stopped
                self._become(_state_of(self.status))

    def _become(self, state: State) -> None:
        self.state = state
        self._changed()


def _state_of(status: Status) -> State:
    match status.state:
        case "ready" | "draining":
            return status.state
        case _:
            return "starting"


def describe(code: int) -> str:
    """The end of a process in words: `exit 1`, `SIGKILL`."""
    if code >= 0:
        return f"exit {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
