"""The engine process: a blocking loop around `EngineCore`.

Started by the I/O process with one end of a socket pair and a status page. It ends when the pair is
closed (having told the sessions of its legs), and dies with the process that started it.

A fault inside the model hurts the legs whose rows raise (`Execution.run`). Any other exception
means that the state may be wrong: the process ends at once and says nothing more, the I/O process
publishes `Died`, and the sessions re-drive.
"""

import ctypes
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from services.gpu_worker.config import EX_CONFIG, EngineLaunch
from services.gpu_worker.engine_core import EngineCore
from services.gpu_worker.frames import FrameReader, Kind, parse_command, publication
from services.gpu_worker.runner import ModelRunner
from services.gpu_worker.simulated import SimulatedRunner, readable_words
from services.gpu_worker.status_page import StatusPage
from shared.config import STEP_THREADS
from shared.log import Throttle, configure, log
from shared.messages import ToWorker, encode
from shared.model_files import ModelFileError, read_model

_LOAD_BOUND_MS = 600_000  # weights of a large model from a slow disk
_WORK_BOUND_MS = 5_000  # between two steps: decode messages, plan, report
_COUNT_S = 0.25  # a busy engine writes its counters so often
_RECEIVE_BYTES = 1 << 20
_NAP_S = 0.001  # at least, where there is nothing to compute
_PR_SET_PDEATHSIG = 1

LOAD_FAILED = 3
"""Exit status: the model could not be loaded this time; the page's detail says why."""


class Channel:
    """The engine's end of the socket pair: waits only in `wait` and when the reader is behind."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._frames = FrameReader()
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self.closed = False

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when there is something to receive, or after so long."""
        self._readable.poll(None if timeout_s is None else 1000 * timeout_s)

    def receive(self) -> Iterator[bytes]:
        """Bodies of the frames that are here now; at the end of the stream `closed` turns true."""
        while True:
            try:
                data = self._sock.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                self.closed = True
                return
            yield from self._frames.feed(data)

    def send(self, data: bytes) -> None:
        try:
            self._sock.sendall(data)
        except ConnectionError:
            self.closed = True  # the I/O process is gone; so is everybody who would read this

    def close(self) -> None:
        """Let the reader know that it has read everything."""
        self._sock.close()


class Engine:
    """Drain the channel, judge time, take a step, report; wait only when there is nothing to do."""

    def __init__(self, core: EngineCore, channel: Channel, page: StatusPage) -> None:
        self._core = core
        self._channel = channel
        self._page = page
        self._decoder = msgspec.msgpack.Decoder(ToWorker)
        self._throttle = Throttle()
        self._bound_ms = 0
        self._began = time.monotonic()
        self._warm_up_s = core.seconds()
        self._idle_s = 0.0
        self._count_at = 0.0

    def run(self) -> None:
        """Until the channel is closed."""
        spec = self._core.spec
        self._page.update(
            ready=1,
            detail="",
            total_blocks=spec.num_blocks,
            block_size=spec.block_size,
            max_model_len=self._core.max_model_len,
        )
        busy = False
        while not self._channel.closed:
            if not busy:
                self._idle()
            for body in self._channel.receive():
                self._take(body)
            self._core.tick(time.monotonic())
            self._send()  # a step may take seconds, and who asked waits
            busy = self._step()
            self._send()
        self._core.move_all(time.monotonic())
        self._send()
        self._channel.close()
        self._enter("exit", 0)

    def _idle(self) -> None:
        """Wait for something to do."""
        self._count_at = 0.0  # what is shown meanwhile is all there is
        self._enter("idle", 0)
        started = time.monotonic()
        wake_at = self._core.wake_at(started)
        self._channel.wait(None if wake_at is None else max(_NAP_S, wake_at - started))
        self._idle_s += time.monotonic() - started
        self._enter("work", _WORK_BOUND_MS)

    def _take(self, body: bytes) -> None:
        kind, payload = parse_command(body)
        now = time.monotonic()
        match kind:
            case Kind.MESSAGE:
                self._receive(payload, now)
            case Kind.SLEPT:
                self._core.slept(now)
            case Kind.CONNECTION_LOST:
                self._core.connection_lost(now)
            case Kind.RECONNECTED:
                self._core.reconnected(now)
            case Kind.REFUSE_NEW:
                self._core.refuse_new(now)

    def _receive(self, payload: bytes, now: float) -> None:
        try:
            message = self._decoder.decode(payload)
        except msgspec.MsgspecError as error:
            self._core.counters["undecodable"] += 1
            self._throttle.warning("undecodable", now, size=len(payload), error=str(error))
            return
        self._core.receive(message, now)

    def _step(self) -> bool:
        batch = self._core.plan()
        if not batch:
            return False
        started = time.monotonic()
        outcomes = self._core.execute(batch, self._enter)
        ended = time.monotonic()
        if (ended - started) * 1000 > self._bound_ms:
            self._core.slept(ended)  # no step lasts that long: this process was stopped
        self._enter("work", _WORK_BOUND_MS)
        self._core.took(batch, ended - started)
        self._core.finish(batch, outcomes, ended)
        return True

    def _send(self) -> None:
        envelopes = self._core.outbox.take()
        if envelopes:
            frames = [publication(subject, encode(message)) for subject, message in envelopes]
            self._channel.send(b"".join(frames))

    def _enter(self, phase: str, bound_ms: int) -> None:
        """Say what comes now, and what was taken before it: a long step keeps it waiting."""
        core, now = self._core, time.monotonic()
        self._bound_ms = bound_ms
        changes: dict[str, Any] = {}
        if now >= self._count_at:
            self._count_at = now + _COUNT_S
            changes["counters"] = msgspec.json.encode(core.stats())
            changes["seconds"] = msgspec.json.encode(self._seconds(now))
        self._page.update(
            phase=phase,
            phase_started=now,
            phase_bound_ms=bound_ms,
            step=core.num_steps,
            load=core.load,
            waiting=core.waiting,
            prefill_tokens_waiting=core.prefill_tokens_waiting,
            term=core.term,
            free_blocks=core.free_blocks,
            **changes,
        )

    def _seconds(self, now: float) -> dict[str, float]:
        """Where all time since the start went: the model's phases, waiting, and the loop itself."""
        model = self._core.seconds()
        spent = {phase: model[phase] - self._warm_up_s[phase] for phase in model}
        spent["idle"] = self._idle_s
        spent["loop"] = max(0.0, now - self._began - sum(spent.values()))
        return {phase: round(seconds, 4) for phase, seconds in spent.items()}


def load(launch: EngineLaunch, progress: Callable[[str], None]) -> ModelRunner:
    """The model that `launch` names, ready for its first step. Raises why it cannot be."""
    config = launch.config
    runner: ModelRunner
    if config.engine == "sim":
        runner = _simulated(launch)
    else:
        progress("weights")
        from services.gpu_worker.loader.packed import FOLDER, PackedCache  # noqa: PLC0415 torch, 2 s
        from services.gpu_worker.model_runner import load_runner  # noqa: PLC0415

        folder = Path(config.packed_dir) if config.packed_dir else FOLDER
        runner = load_runner(
            Path(launch.model),
            dtype=config.dtype,
            quantize=config.quantize,
            num_blocks=config.num_blocks,
            kv_bytes_max=config.kv_bytes_max,
            max_model_len=config.max_model_len,
            num_threads=config.num_threads or _threads("OMP_NUM_THREADS"),
            step_threads=config.num_threads or _threads(STEP_THREADS),
            progress=progress,
            kv_dtype=config.kv_dtype,
            kv_policy=config.policy(),
            cache=PackedCache(folder, config.packed_bytes_max),
        )
        # 270 MB that packing has freed, and the allocator would keep.
        ctypes.CDLL(None).malloc_trim(0)
    progress("warm-up")
    runner.warm_up()
    return runner


def _simulated(launch: EngineLaunch) -> SimulatedRunner:
    config = launch.config.sim
    if not launch.model:
        return SimulatedRunner(config, sleep=time.sleep)
    vocabulary = read_model(Path(launch.model)).vocabulary
    return SimulatedRunner(
        config,
        words=readable_words(vocabulary),
        end_ids=sorted(vocabulary.end_ids),
        vocab_size=vocabulary.size,
        sleep=time.sleep,
    )


def _threads(variable: str) -> int:
    """What the supervisor shared out among the workers of this host, else all CPUs but one."""
    return int(os.environ.get(variable, "0")) or max(1, len(os.sched_getaffinity(0)) - 1)


def _die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the I/O process ended before its engine began")


def main() -> None:
    launch = msgspec.json.decode(sys.argv[1], type=EngineLaunch)
    configure("engine", launch.instance)
    _die_with(launch.parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # meant for the I/O process, which drains us
    channel = Channel(socket.socket(fileno=launch.channel_fd))
    page = StatusPage(launch.page_fd)
    page.update(phase="load", phase_started=time.monotonic(), phase_bound_ms=_LOAD_BOUND_MS)
    try:
        runner = load(launch, lambda stage: page.update(detail=stage))
    except Exception as error:  # noqa: BLE001 whatever it is, the operator is told in one sentence
        log.error("load_failed", exc_info=error)
        page.update(detail=str(error) or type(error).__name__)
        # What a file or a setting holds, the next engine will find as well.
        sys.exit(EX_CONFIG if isinstance(error, ModelFileError | ValueError) else LOAD_FAILED)
    core = EngineCore(launch.instance, runner, launch.config, time.monotonic())
    Engine(core, channel, page).run()
    os._exit(0)  # nothing is left to save, and an orderly exit of torch takes seconds


if __name__ == "__main__":
    main()
