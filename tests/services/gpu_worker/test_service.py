"""A worker as the mesh sees it: two real processes behind one inbox."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.gpu_worker.service import GpuWorker
from shared.config import ConfigError, Launch
from shared.errors import Unavailable
from shared.ids import pack_ids, unpack_ids
from shared.messages import (
    Beat,
    Died,
    Ended,
    Failed,
    Renewed,
    RouteLost,
    Started,
    StepDone,
    encode,
)
from shared.sampling import SamplingParams
from shared.subjects import DIED, beat, inbox
from shared.testing import MemoryBroker, MemoryBus, eventually, running
from tests.services.gpu_worker.engine_kit import run
from tests.services.launches import launch_of

FAST = {"step_ms": 1, "per_token_us": 0, "output_tokens_max": 0, "num_blocks": 256}
Heard = Started | StepDone | Ended | Failed | RouteLost | Renewed | Beat | Died


class Mesh:
    """A bus with a worker on it, and all that it says."""

    def __init__(self, **sim: Any) -> None:
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker)
        self.heard: list[Any] = []
        self._decoder = msgspec.msgpack.Decoder(Heard)
        self.worker = GpuWorker(launch({**FAST, **sim}), MemoryBus(self.broker))

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[GpuWorker]:
        for subject in (inbox("g-1"), inbox("d-1"), inbox("s-1"), beat("gpu_worker"), DIED):
            await self.bus.subscribe(subject, self._hear)
        async with running(self.worker):
            yield self.worker

    def run(self, choice: int = 0, max_tokens: int = 20, prompt: list[int] | None = None) -> None:
        message = run(
            term=3,
            choice=choice,
            prompt_ids=pack_ids(prompt or range(40)),
            sampling=SamplingParams(max_tokens=max_tokens, seed=choice),
        )
        self.bus.publish(inbox(self.worker.instance), encode(message))

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    def ids(self, choice: int = 0) -> list[int]:
        records = [record for message in self.of(StepDone) for record in message.records]
        return [i for r in records if r.choice == choice for i in unpack_ids(r.ids)]

    def _hear(self, delivery: Any) -> None:
        self.heard.append(self._decoder.decode(delivery.payload))


def launch(sim: dict[str, Any], **changes: Any) -> Launch:
    settings = {"engine": "sim", "drain_s": 0.2, "sim": sim, **changes}
    return launch_of("gpu_worker", "gpu_worker-0-aaaaaa", settings, model_name="m")


def engine_pid(worker: GpuWorker) -> int:
    pid = worker.engine.pid
    assert pid is not None
    return pid


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_leg_runs_through_both_processes() -> None:
    """A `Run` in the inbox becomes `Started`, 20 ids in order, and `Ended`; beats show the work,
    and `$SRV.STATS` what the engine counted.
    """
    mesh = Mesh()
    async with mesh.up() as worker:
        mesh.run()
        await eventually(lambda: bool(mesh.of(Ended)))
        await eventually(lambda: mesh.of(Beat)[-1].step == 20)
        last = mesh.of(Beat)[-1]
        stats = worker.stats()
        await eventually(lambda: mesh.of(Beat)[-1].engine_seconds.get("simulated", 0) > 0)
        told = [beat.engine_counts for beat in mesh.of(Beat) if beat.engine_counts]
        seconds = mesh.of(Beat)[-1].engine_seconds

    assert (stats["engine_steps"], stats["engine_output_tokens"]) == (20, 20)
    assert [s.worker for s in mesh.of(Started)] == [worker.instance]
    assert len(mesh.ids()) == 20
    assert (last.term, last.load, last.waiting, last.model) == (3, 0, 0, "m")
    assert (last.free_blocks, last.total_blocks, last.block_size) == (256, 256, 16)
    assert (last.phase, last.phase_age_ms) == ("idle", 0)
    assert told[-1] == {
        "queried_tokens": 40,
        "l1_hit_tokens": 0,
        "l2_hit_tokens": 0,
        "preemptions": 0,
    }
    assert seconds.keys() == {"simulated", "l2_copy", "idle", "loop"}
    assert seconds["simulated"] >= 20 * FAST["step_ms"] / 1000
    assert stats["engine_us_simulated"] == pytest.approx(1e6 * seconds["simulated"])
    assert mesh.of(Died) == []


async def test_garbage_on_the_bus_hurts_nobody() -> None:
    """An undecodable payload is dropped by the engine, which goes on."""
    mesh = Mesh()
    async with mesh.up() as worker:
        mesh.bus.publish(inbox(worker.instance), b"\xc1 not a message")
        mesh.run()
        await eventually(lambda: bool(mesh.of(Ended)))

        await eventually(lambda: worker.stats().get("engine_undecodable") == 1)

    assert len(mesh.ids()) == 20


async def test_a_drain_moves_what_does_not_finish_in_time() -> None:
    """After SIGTERM a long leg is given up with `RouteLost`, and the engine is gone."""
    mesh = Mesh(step_ms=5)
    async with mesh.up() as worker:
        mesh.run(max_tokens=3000)
        await eventually(lambda: bool(mesh.ids()))
        pid = engine_pid(worker)

    await eventually(lambda: bool(mesh.of(RouteLost)))
    assert [lost.reason for lost in mesh.of(RouteLost)] == ["drain"]
    assert not is_running(pid)


async def test_a_drain_lets_legs_finish_and_sends_new_ones_elsewhere() -> None:
    """Also one that was placed before the scheduler heard of the drain."""
    mesh = Mesh(step_ms=5)
    patient = launch({**FAST, "step_ms": 5}, drain_s=60)
    mesh.worker = GpuWorker(patient, MemoryBus(mesh.broker))
    async with mesh.up() as worker:
        mesh.run(max_tokens=100)
        await eventually(lambda: bool(mesh.ids()))
        worker.stop()
        await eventually(lambda: worker.draining)
        mesh.run(choice=1)

    assert len(mesh.ids()) == 100
    assert [(lost.choice, lost.reason) for lost in mesh.of(RouteLost)] == [(1, "drain")]
    assert mesh.ids(choice=1) == []


async def test_the_death_of_the_engine_is_told_at_once_and_ends_the_worker() -> None:
    """The I/O process waits on the pid: `Died`, then it fails, so that both are started anew."""
    mesh = Mesh(crash_id=99)

    async def live() -> None:
        async with mesh.up():
            mesh.run(prompt=[1, 99, 2])
            await eventually(lambda: bool(mesh.of(Died)))

    with pytest.raises(Unavailable, match="status 70"):
        await live()
    (died,) = mesh.of(Died)
    assert died.instance == mesh.worker.instance


async def test_a_hung_engine_is_killed() -> None:
    """A phase that outlasts its bound while the step stands still: not ready, killed, `Died`."""
    mesh = Mesh(step_ms=5, bound_ms=500)

    async def live() -> None:
        async with mesh.up() as worker:
            mesh.run(max_tokens=3000)
            await eventually(lambda: bool(mesh.ids()))
            os.kill(engine_pid(worker), signal.SIGSTOP)
            await eventually(lambda: bool(mesh.of(Died)), timeout_s=20)
            assert not worker.ready

    with pytest.raises(Unavailable, match="status -9"):
        await live()
    stuck = [b for b in mesh.of(Beat) if b.phase_bound_ms and b.phase_age_ms > b.phase_bound_ms / 2]
    assert stuck, "beats go on while the engine stands still"


async def test_a_model_that_cannot_be_loaded_is_named() -> None:
    """The worker ends with one sentence that says which file, and is never ready. Whoever starts
    workers is told to try no other: it would take as long and find the same.
    """
    missing = msgspec.structs.replace(launch(FAST), model="/nowhere/model.gguf")
    worker = GpuWorker(missing, MemoryBus())

    with pytest.raises(ConfigError, match=r"model\.gguf"):
        async with running(worker):
            pass


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_legz": 3}, "max_legz"),
        ({"max_legs": 0}, "max_legs"),
        ({"sim": {"step_ms": "fast"}}, "step_ms"),
        ({"sim": {"output_tokens_min": 9, "output_tokens_max": 3}}, "output_tokens_min"),
    ],
)
async def test_a_bad_setting_is_named(settings: dict[str, Any], named: str) -> None:
    """Unknown, mistyped and contradictory settings stop the process and name the key."""
    with pytest.raises(ConfigError, match=named):
        GpuWorker(msgspec.structs.replace(launch(FAST), settings=settings), MemoryBus())


ORPHAN = """
import asyncio, json, sys
from services.gpu_worker.config import WorkerConfig
from services.gpu_worker.engine_process import EngineProcess
from shared.config import Launch

async def main():
    launch = Launch(**json.loads(sys.argv[1]))
    engine = EngineProcess(launch, WorkerConfig(engine="sim"), lambda subject, payload: None)
    await engine.start()
    while not engine.status().ready:
        await asyncio.sleep(0.01)
    print(engine.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True])
async def test_no_engine_outlives_its_io_process(stopped: bool) -> None:
    """`kill -9` of the I/O process takes the engine along, even one that hangs."""
    argument = json.dumps(msgspec.to_builtins(launch(FAST)))
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, argument], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent, contextlib.closing(parent.stdout):
        pid = int(await asyncio.to_thread(parent.stdout.readline))
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
    await eventually(lambda: not is_running(pid), what="the engine is gone")
