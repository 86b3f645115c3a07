"""A child process is started, heard, started again, and ended, whatever it does."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil

from deploy.child import Child, ChildSpec, Command, describe
from deploy.errors import ClusterError
from deploy.restart import RestartPolicy, SilencePolicy

STAND_IN = Path(__file__).parent / "stand_in.py"
SWIFT = RestartPolicy(base_s=0.01, jitter=0.0)


class Watched:
    """A child, and what its supervisor was told."""

    def __init__(self, tmp_path: Path, behaviour: str, *rest: str, silence_s: float = 60.0) -> None:
        def command(instance: str, status_fd: int) -> Command:
            argv = [sys.executable, str(STAND_IN), str(status_fd), behaviour, *rest]
            return Command(argv, os.environ)

        self.deaths: list[tuple[str, str]] = []
        self.changed = asyncio.Event()
        spec = ChildSpec(
            name="stand_in-0",
            role="stand_in",
            log=tmp_path / "log",
            command=command,
            restart=SWIFT,
            silence=SilencePolicy(limit_s=silence_s),
            hurry_s=0.1,
        )
        self.child = Child(spec, self.died, self.changed.set)

    def died(self, child: Child, reason: str) -> None:
        self.deaths.append((child.instance, reason))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Child]:
        task = asyncio.create_task(self.child.run())
        try:
            yield self.child
        finally:
            await self.child.stop(grace_s=5.0)
            await task


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_what_a_child_says_is_known(tmp_path: Path) -> None:
    """Its state, load and detail are those of its last status line; it ends on SIGTERM."""
    watched = Watched(tmp_path, "well")
    async with watched.running() as child:
        await watched.until(lambda: child.state == "ready")
        assert (child.status.load, child.status.detail) == (3, "here")
        pid = child.pid

    assert not alive(pid)
    assert child.state == "stopped"
    assert watched.deaths == []  # it was asked to


async def test_a_killed_child_returns_as_another_instance(tmp_path: Path) -> None:
    """SIGKILL: its death is told with its instance, and a new instance takes its place."""
    watched = Watched(tmp_path, "well")
    async with watched.running() as child:
        await watched.until(lambda: child.state == "ready")
        first, pid = child.instance, child.pid
        os.kill(pid, signal.SIGKILL)
        await watched.until(lambda: child.state == "ready" and child.pid not in {0, pid})

        assert watched.deaths == [(first, "SIGKILL")]
        assert child.instance != first
        assert child.instance.startswith("stand_in-0-")
        assert child.restarts.total == 1


async def test_a_child_that_keeps_crashing_is_given_up(tmp_path: Path) -> None:
    """After five restarts it stays down, its reason known and its words in its log."""
    watched = Watched(tmp_path, "crash")
    async with watched.running() as child:
        await watched.until(lambda: child.state == "failed")

    assert [reason for _, reason in watched.deaths] == ["exit 3"] * 6
    assert len({instance for instance, _ in watched.deaths}) == 6
    assert "the reason of the crash" in (tmp_path / "log").read_text()


async def test_wrong_settings_are_not_tried_again(tmp_path: Path) -> None:
    """A process that says its settings are wrong is given up at once."""
    watched = Watched(tmp_path, "misconfigured")
    async with watched.running() as child:
        await watched.until(lambda: child.state == "failed")

    assert child.restarts.total == 0


async def test_a_silent_child_is_killed(tmp_path: Path) -> None:
    """It lives and says nothing: it is killed, and that is told as the reason."""
    watched = Watched(tmp_path, "silent", silence_s=0.2)
    async with watched.running() as child:
        await watched.until(lambda: child.state == "ready")
        async with asyncio.timeout(20):
            while not watched.deaths:
                child.check_silence(asyncio.get_running_loop().time())
                await asyncio.sleep(0.01)

    assert watched.deaths[0][1] == "silent for 0.2 s"


async def test_a_paused_child_goes_on_when_resumed(tmp_path: Path) -> None:
    """SIGSTOP stops it and is shown; SIGCONT lets the same process go on."""
    watched = Watched(tmp_path, "well")
    async with watched.running() as child:
        await watched.until(lambda: child.state == "ready")
        pid = child.pid
        child.pause()
        async with asyncio.timeout(20):
            while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
                await asyncio.sleep(0.01)
        assert child.state == "paused"
        child.resume()
        await watched.until(lambda: child.state == "ready")

        assert child.pid == pid
        assert watched.deaths == []


async def test_a_paused_or_stubborn_child_can_be_stopped(tmp_path: Path) -> None:
    """Neither SIGSTOP nor a child that ignores SIGTERM keeps a cluster from going down."""
    paused, stubborn = Watched(tmp_path, "well"), Watched(tmp_path, "stubborn")
    tasks = [asyncio.create_task(watched.child.run()) for watched in (paused, stubborn)]
    for watched in (paused, stubborn):
        await watched.until(lambda child=watched.child: child.state == "ready")  # type: ignore[misc]
    pids = [watched.child.pid for watched in (paused, stubborn)]
    paused.child.pause()
    await asyncio.gather(paused.child.stop(5.0), stubborn.child.stop(0.1))
    await asyncio.gather(*tasks)

    assert not any(alive(pid) for pid in pids)


async def test_a_child_that_takes_its_time_is_told_that_it_is_up(tmp_path: Path) -> None:
    """A second SIGTERM after the grace, and time to act on it, before SIGKILL."""
    watched = Watched(tmp_path, "patient")
    watched.child.spec = msgspec.structs.replace(watched.child.spec, hurry_s=20.0)
    task = asyncio.create_task(watched.child.run())
    await watched.until(lambda: watched.child.state == "ready")
    await watched.child.stop(grace_s=0.1)
    await task

    assert watched.child.reason == "exit 7"


async def test_ends_that_a_person_asked_for_are_no_crashes(tmp_path: Path) -> None:
    """However often it is killed by command, it is started again; crashes count as before."""
    watched = Watched(tmp_path, "well")
    async with watched.running() as child:
        for count in range(SWIFT.limit + 2):
            await watched.until(lambda: child.state == "ready")
            child.kill("killed by command", asked=True)
            await watched.until(lambda seen=count: len(watched.deaths) > seen)  # type: ignore[misc]
        for _ in range(SWIFT.limit + 1):
            await watched.until(lambda: child.state == "ready")
            os.kill(child.pid, signal.SIGKILL)
            await watched.until(lambda: child.state != "ready")
        await watched.until(lambda: child.state == "failed")

    assert child.restarts.total == SWIFT.limit + 2 + SWIFT.limit


async def test_what_a_child_started_dies_with_it(tmp_path: Path) -> None:
    """A killed child's own children do not outlive it."""
    file = tmp_path / "pid"
    watched = Watched(tmp_path, "parent", str(file))
    async with watched.running() as child:
        await watched.until(lambda: child.state == "ready")
        grandchild = int(file.read_text())
        assert alive(grandchild)
        os.kill(child.pid, signal.SIGKILL)
        await watched.until(lambda: bool(watched.deaths))
        async with asyncio.timeout(20):
            while alive(grandchild):
                await asyncio.sleep(0.01)


async def test_garbage_on_the_status_pipe_is_ignored(tmp_path: Path) -> None:
    """What is no status line changes nothing and takes no memory."""
    watched = Watched(tmp_path, "garbage")
    async with watched.running() as child:
        await watched.until(lambda: child.state == "ready")

        assert watched.deaths == []


async def test_a_program_that_is_not_there_is_given_up(tmp_path: Path) -> None:
    """A child that cannot even be started counts as one that dies."""
    watched = Watched(tmp_path, "well")
    spec = ChildSpec(
        name="nobody-0",
        role="nobody",
        log=tmp_path / "log",
        command=lambda _instance, _fd: Command(["/nowhere/nobody"], {}),
        restart=SWIFT,
    )
    child = Child(spec, watched.died, watched.changed.set)
    await child.run()

    assert child.state == "failed"
    assert child.reason == "cannot be started: No such file or directory"


async def test_a_child_that_has_run_outlasts_a_full_disk(tmp_path: Path) -> None:
    """Once it has run, it is started again however often its launch file could not be written."""
    watched = Watched(tmp_path, "well")
    refusals = 0

    def command(instance: str, status_fd: int) -> Command:
        nonlocal refusals
        if watched.deaths and refusals < 2 * SWIFT.limit:
            refusals += 1
            raise ClusterError("The disk is full.")
        return well(instance, status_fd)

    well = watched.child.spec.command
    restart = msgspec.structs.replace(SWIFT, cap_s=0.01)
    watched.child.spec = msgspec.structs.replace(
        watched.child.spec, command=command, restart=restart
    )
    async with watched.running() as child:
        await watched.until(lambda: child.state == "ready")
        child.kill("killed")
        await watched.until(lambda: child.state in {"ready", "failed"})

        assert child.state == "ready"
    refused = ["cannot be started: The disk is full."] * (2 * SWIFT.limit)
    assert [why for _, why in watched.deaths] == ["killed", *refused]


def test_ends_in_words() -> None:
    """An exit status and a signal are told apart."""
    assert describe(0) == "exit 0"
    assert describe(-9) == "SIGKILL"
    assert describe(-64) == "SIGRTMAX"
    assert describe(-99) == "signal 99"
