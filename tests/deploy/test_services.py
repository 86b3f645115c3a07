"""Services are scaled and replaced one by one; stand-ins do as their ordinal is told."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from deploy.child import ChildSpec, Command
from deploy.children import Children
from deploy.config import ClusterTable
from deploy.errors import ClusterError
from deploy.restart import RestartPolicy
from deploy.services import Services

STAND_IN = Path(__file__).parent / "stand_in.py"
TABLE = ClusterTable(
    host="", port=0, pool="", model="", ready_timeout_s=30.0, drain_s=1.0, retire_s=20.0
)


class Rig:
    """`behaviour` of a role's next start: "well" unless set."""

    def __init__(self, folder: Path) -> None:
        self.behaviour: dict[str, str] = {}
        self.shares: list[int] = []  # how many of its role each one that started was told of
        self.beside: list[tuple[str, list[str]]] = []  # who started, and who was ready then
        self.retired: list[str] = []
        self.told: list[str] = []
        self.children = Children(lambda _child, _reason: None)
        self.services = Services(
            self.children, TABLE, self.spec, lambda child: self.retired.append(child.instance)
        )
        self._folder = folder

    def spec(self, role: str, ordinal: int, replicas: Callable[[], int]) -> ChildSpec:
        name = f"{role}-{ordinal}"

        def command(_instance: str, status_fd: int) -> Command:
            self.shares.append(replicas())
            self.beside.append((name, sorted(self.running())))
            how = self.behaviour.get(role, "well")
            return Command([sys.executable, str(STAND_IN), str(status_fd), how], os.environ)

        log, restart = self._folder / name, RestartPolicy(limit=0)
        return ChildSpec(
            name=name, role=role, ordinal=ordinal, log=log, command=command, restart=restart
        )

    async def up(self, **counts: int) -> None:
        for role, count in counts.items():
            await self.services.scale(role, count, self.tell)
        self.told.clear()

    def tell(self, note: str) -> None:
        self.told.append(note)

    def running(self) -> dict[str, int]:
        """Name -> pid of those that are ready."""
        return {c.spec.name: c.pid for c in self.children if c.state == "ready"}


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    await rig.children.end(rig.children, 5.0)


async def test_up_adds_and_down_takes_the_highest_ordinals(rig: Rig) -> None:
    """Those that stay are the same processes; each new one shares with as many as there are."""
    await rig.up(gpu_worker=1)
    first = rig.running()
    await rig.services.scale("gpu_worker", 3, rig.tell)
    three = rig.running()
    assert list(three) == ["gpu_worker-0", "gpu_worker-1", "gpu_worker-2"]
    assert three["gpu_worker-0"] == first["gpu_worker-0"]
    assert rig.shares == [1, 3, 3]

    await rig.services.scale("gpu_worker", 2, rig.tell)
    await rig.services.scale("gpu_worker", 2, rig.tell)
    assert rig.running() == {name: three[name] for name in ("gpu_worker-0", "gpu_worker-1")}
    assert [instance.rpartition("-")[0] for instance in rig.retired] == ["gpu_worker-2"]
    assert rig.told == ["gpu_worker: 1 -> 3", "gpu_worker: 3 -> 2", "gpu_worker: 2 -> 2"]


async def test_what_cannot_come_up_is_taken_back(rig: Rig) -> None:
    """The reason is told, those that were there go on, and the next try starts from there."""
    await rig.up(tokenizer=1)
    before = rig.running()
    rig.behaviour["tokenizer"] = "crash"
    with pytest.raises(ClusterError, match=r"tokenizer-[12] cannot run .*the reason of the crash"):
        await rig.services.scale("tokenizer", 3, rig.tell)
    assert [c.spec.name for c in rig.children] == ["tokenizer-0"]
    assert rig.running() == before

    del rig.behaviour["tokenizer"]
    await rig.services.scale("tokenizer", 2, rig.tell)
    assert list(rig.running()) == ["tokenizer-0", "tokenizer-1"]


async def test_rolling_replaces_each_in_turn_and_never_leaves_a_role_empty(rig: Rig) -> None:
    """The only one of its role goes when a spare is ready; one of several makes room first."""
    await rig.up(gateway=1, scheduler=2)
    before = rig.running()
    rig.beside.clear()
    await rig.services.roll([], rig.tell)

    after = rig.running()
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())
    assert rig.told == ["gateway-0 (1 of 3)", "scheduler-0 (2 of 3)", "scheduler-1 (3 of 3)"]
    assert len(rig.retired) == 3
    assert rig.beside == [
        ("gateway-0", ["gateway-0", "scheduler-0", "scheduler-1"]),
        ("scheduler-0", ["gateway-0", "scheduler-1"]),
        ("scheduler-1", ["gateway-0", "scheduler-0"]),
    ]


async def test_rolling_takes_roles_and_names(rig: Rig) -> None:
    """What is not named keeps its process; an unknown name replaces nothing."""
    await rig.up(tokenizer=1, scheduler=2)
    before = rig.running()
    with pytest.raises(ClusterError, match="no 'nats'; there are: scheduler, scheduler-0"):
        await rig.services.roll(["tokenizer", "nats"], rig.tell)
    assert rig.running() == before
    await rig.services.roll(["tokenizer", "scheduler-1"], rig.tell)
    after = rig.running()
    assert [name for name in before if before[name] == after[name]] == ["scheduler-0"]


async def test_a_rolling_restart_ends_where_a_successor_cannot_run(rig: Rig) -> None:
    """The only one of its role goes on as it was, and those after it were not touched."""
    await rig.up(tokenizer=1, kv_tier=1)
    before = rig.running()
    rig.behaviour["tokenizer"] = "crash"
    with pytest.raises(ClusterError, match="tokenizer-0 cannot run"):
        await rig.services.roll([], rig.tell)
    assert rig.running() == before


async def test_rolling_brings_back_what_was_given_up(rig: Rig) -> None:
    """A process that failed for good is replaced like any other."""
    await rig.up(kv_tier=1)
    (child,) = rig.children
    child.kill("crashed")
    async with asyncio.timeout(10):
        while child.state != "failed":
            await asyncio.sleep(0.01)
    await rig.services.roll(["kv_tier-0"], rig.tell)
    assert list(rig.running()) == ["kv_tier-0"]
    assert len(rig.children) == 1


async def test_who_asked_and_left_ends_it_between_two_processes(rig: Rig) -> None:
    """Ctrl-C: the one at work is replaced whole, the others are left alone."""
    await rig.up(scheduler=3)
    before = rig.running()

    def leave_before_the_second(note: str) -> None:
        if "2 of 3" in note:
            raise ConnectionResetError

    with pytest.raises(ConnectionError):
        await rig.services.roll([], leave_before_the_second)
    after = rig.running()
    assert [name for name in before if before[name] == after[name]] == [
        "scheduler-1",
        "scheduler-2",
    ]


@pytest.mark.parametrize(
    ("role", "count", "words"),
    [
        ("nats", 2, "no role 'nats'; there are: gateway, tokenizer"),
        ("gpu_worker", 0, "gpu_worker=0: there can be 1 to 64"),
        ("gpu_worker", -1, "gpu_worker=-1: there can be 1 to 64"),
        ("gpu_worker", 65, "gpu_worker=65: there can be 1 to 64"),
    ],
)
async def test_what_cannot_be_scaled_is_refused(
    rig: Rig, role: str, count: int, words: str
) -> None:
    """In a sentence that says what can, and nothing is started."""
    with pytest.raises(ClusterError, match=words):
        await rig.services.scale(role, count, rig.tell)
    assert not len(rig.children)
