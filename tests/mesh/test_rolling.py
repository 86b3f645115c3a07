"""The mesh is changed while it serves, and no client notices."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import psutil
import pytest

from tests.mesh.cluster import Mesh
from tests.mesh.test_failover import answer

STEP_MS = 50  # slow enough for the clients, all in one process, to be in mid-stream all the while
LENGTHS = [150, 3, 40, 15, 80]  # ids; the longest outlasts the drain of a worker
CLIENTS = 16

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def slow_mesh(tmp_path: Path) -> Iterator[Mesh]:
    """Two simulated workers that take their time."""
    slow = f"gpu_worker.sim.step_ms={STEP_MS}"
    with Mesh(tmp_path / "run", "--engine", "sim", "gpu_worker.replicas=2", slow) as running:
        yield running


class Load:
    """Clients that ask one question after another, and hold each answer against a calm one."""

    def __init__(self, mesh: Mesh, client: openai.AsyncOpenAI) -> None:
        self.answers = 0
        self.failed: list[str] = []
        self.different: list[int] = []
        self._mesh = mesh
        self._client = client
        self._calm: list[str] = []
        self._enough = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """From when every client is in the middle of a stream to the last answer of each."""
        self._calm = await asyncio.gather(*(self._ask(number) for number in range(len(LENGTHS))))
        under_way = asyncio.Semaphore(0)
        async with asyncio.TaskGroup() as clients:
            for first in range(CLIENTS):
                clients.create_task(self._go_on(first, under_way))
            for _ in range(CLIENTS):
                await under_way.acquire()
            try:
                yield
            finally:
                self._enough.set()
        assert (self.failed, self.different) == ([], [])

    async def _ask(self, number: int, under_way: asyncio.Semaphore | None = None) -> str:
        return await answer(self._client, self._mesh.model, number, LENGTHS[number], under_way)

    async def _go_on(self, first: int, under_way: asyncio.Semaphore) -> None:
        """The longest question first, so that all clients are in mid-stream at some time."""
        turns = itertools.cycle(range(len(LENGTHS)))
        for number in itertools.chain([0], itertools.islice(turns, first, None)):
            try:
                text = await self._ask(number, under_way)
            except (openai.OpenAIError, AssertionError) as error:
                self.failed.append(f"{number}: {error!r} from {error.__cause__!r}")
                under_way.release()
            else:
                self.answers += 1
                self.different += [number] * (text != self._calm[number])
            if self._enough.is_set():
                return


def pids(mesh: Mesh) -> set[int]:
    """Every process that serves, those that services have started themselves included."""
    services = [p for p in mesh.processes() if p["name"] not in {"nats", "redis"}]
    children = [psutil.Process(p["pid"]).children(recursive=True) for p in services]
    return {p["pid"] for p in services} | {c.pid for some in children for c in some}


async def test_a_rolling_restart_replaces_every_process_and_no_client_notices(
    slow_mesh: Mesh,
) -> None:
    """Under 16 streams of many lengths: none fails, none differs; roles of one process and of two;
    NATS and Redis stay.
    """
    before = pids(slow_mesh), [p["pid"] for p in slow_mesh.processes()[:2]]
    async with slow_mesh.client() as client:
        load = Load(slow_mesh, client)
        async with load.running():
            rolled = await asyncio.to_thread(slow_mesh.shoal, "rolling")
            assert rolled.returncode == 0, rolled.stdout + rolled.stderr

    assert len(before[0]) == 10  # each of the two workers has an engine
    assert before[0] & pids(slow_mesh) == set()
    assert [p["pid"] for p in slow_mesh.processes()[:2]] == before[1]
    assert {p["state"] for p in slow_mesh.processes()} == {"ready"}
    assert slow_mesh.restarts() == 0
    assert load.answers > CLIENTS
    moved = (await slow_mesh.metrics()).get("shoal:redrives_total", 0.0)
    assert moved > 0, f"no stream was in anybody's way, of {load.answers}"
    await slow_mesh.quiet()


async def shows_workers(mesh: Mesh, count: int) -> None:
    async with asyncio.timeout(30):
        while (await mesh.metrics())["shoal:workers"] != count:
            await asyncio.sleep(0.05)


async def test_scaling_up_and_down_is_not_seen_by_clients(slow_mesh: Mesh) -> None:
    """Three of each and back to one under load; names count from 0, and what is there is used."""
    roles = ("gateway", "tokenizer", "scheduler", "gpu_worker", "kv_tier", "detokenizer")
    async with slow_mesh.client() as client:
        load = Load(slow_mesh, client)
        async with load.running():
            for count in (3, 1):
                asked = [f"{role}={count}" for role in roles]
                scaled = await asyncio.to_thread(slow_mesh.shoal, "scale", *asked)
                assert scaled.returncode == 0, scaled.stdout + scaled.stderr
                services = slow_mesh.processes()[2:]
                assert [p["name"] for p in services] == [
                    f"{role}-{ordinal}" for role in roles for ordinal in range(count)
                ]
                assert {p["state"] for p in services} == {"ready"}
                await shows_workers(slow_mesh, count)

    assert slow_mesh.restarts() == 0
    assert load.answers > CLIENTS
    await slow_mesh.quiet()
