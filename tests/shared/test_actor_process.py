"""A service as the process it is: how it starts, what it writes, how it ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from deploy.servers import Running, Server, start, start_nats
from shared.bus import Delivery
from shared.config import Launch
from shared.errors import Unavailable
from shared.messages import Cancel, encode
from shared.nats_bus import NatsBus
from shared.subjects import inbox
from shared.testing import eventually

SERVICE = """
import asyncio
import sys
from pathlib import Path
from shared.actor import Actor
from shared.config import read_launch
from shared.core import Outbox
from shared.messages import Cancel
from shared.process import run_service

class Core:
    def __init__(self): self.outbox, self.counters = Outbox(), {}
    def tick(self, now): pass
    def receive(self, message, now): raise ValueError("the core")

class Service(Actor):
    role = "tokenizer"
    mailbox = Cancel
    drain_s = 600.0

    async def drain(self):
        while self.launch.model == "patient":
            await asyncio.sleep(1)

run_service(read_launch(Path(sys.argv[1])), lambda launch, bus: Service(launch, bus, Core()))
"""
ME = "tokenizer-0-abc"


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[Running]:
    """A server that the test may kill or put under another password."""
    running = start_nats(tmp_path / "nats")
    yield running
    running.stop()


class Service:
    def __init__(self, process: subprocess.Popen[bytes], status: int) -> None:
        self.process = process
        self.status = status
        self.lines: list[str] = []

    def state(self) -> str:
        with contextlib.suppress(BlockingIOError):
            self.lines += os.read(self.status, 65536).decode().splitlines()
        return json.loads(self.lines[-1])["state"] if self.lines else ""

    def log(self) -> list[dict[str, object]]:
        assert self.process.stderr is not None
        return [json.loads(line) for line in self.process.stderr.read().splitlines()]


@contextlib.contextmanager
def service(server: Server, tmp_path: Path, **changes: str) -> Iterator[Service]:
    status, writer = os.pipe()
    os.set_blocking(status, False)
    launch = Launch(
        role="tokenizer",
        name="tokenizer-0",
        instance=ME,
        nats_url=server.url,
        nats_user=server.user,
        nats_password=server.password,
        run_dir=str(tmp_path),
        status_fd=writer,
    )
    path = tmp_path / "launch.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(launch, **changes)))
    with subprocess.Popen(
        [sys.executable, "-c", SERVICE, str(path)], stderr=subprocess.PIPE, pass_fds=[writer]
    ) as process:
        os.close(writer)
        try:
            yield Service(process, status)
        finally:
            process.kill()
            os.close(status)


async def test_sigterm_drains_and_exits_0(nats_server: Server, tmp_path: Path) -> None:
    """Status lines say starting, ready, draining; the log is JSON and names the instance."""
    with service(nats_server, tmp_path) as it:
        await eventually(lambda: it.state() == "ready", 20)
        it.process.send_signal(signal.SIGTERM)
        await eventually(lambda: it.process.poll() == 0, 20)
        it.state()
        states = list(dict.fromkeys(json.loads(line)["state"] for line in it.lines))
        assert states[-2:] == ["ready", "draining"]
        assert json.loads(it.lines[-1])["extra"]["tasks"] >= 2, "the timer and run, at least"
        log = it.log()
        assert [entry["event"] for entry in log] == ["ready", "draining"]
        assert {entry["instance"] for entry in log} == {ME}


async def test_a_second_sigterm_cuts_the_drain_off(nats_server: Server, tmp_path: Path) -> None:
    """The first one lets it take its time; the exit is as orderly."""
    with service(nats_server, tmp_path, model="patient") as it:
        await eventually(lambda: it.state() == "ready", 20)
        it.process.send_signal(signal.SIGTERM)
        await eventually(lambda: it.state() == "draining", 20)
        it.process.send_signal(signal.SIGTERM)
        await eventually(lambda: it.process.poll() == 0, 20)
        assert it.log()[-1]["event"] == "drain_cut_off"


async def test_a_broken_state_exits_1(nats_server: Server, tmp_path: Path) -> None:
    """The log holds the traceback."""
    bus = await NatsBus.connect(
        nats_server.url, nats_server.user, nats_server.password, name="test"
    )
    with service(nats_server, tmp_path) as it:
        await eventually(lambda: it.state() == "ready", 20)
        bus.publish(inbox(ME), encode(Cancel(request_id="0" * 32, choice=0, epoch=1)))
        await eventually(lambda: it.process.poll() == 1, 20)
        assert any("the core" in str(entry.get("exception")) for entry in it.log())
    await bus.close()


async def test_the_server_may_come_and_go(nats: Running, tmp_path: Path) -> None:
    """NATS killed and started again: the same process answers again."""
    server = nats.server
    with service(server, tmp_path) as it:
        await eventually(lambda: it.state() == "ready", 20)
        nats.process.kill()
        nats.process.wait()
        again = start(server)
        bus = await NatsBus.connect(server.url, server.user, server.password, name="test")
        answers: list[Delivery] = []
        while not answers:
            with contextlib.suppress(Unavailable):
                answers.append(await bus.request(f"$SRV.PING.shoal-tokenizer.{ME}", b"", 5))
        assert json.loads(answers[0].payload)["id"] == ME
        assert it.process.poll() is None
        await bus.close()
        again.stop()


async def test_no_bus_is_said_in_one_line(nats_server: Server, tmp_path: Path) -> None:
    with service(nats_server, tmp_path, nats_password="wrong") as it:
        await eventually(lambda: it.process.poll() == 1, 20)
        last = it.log()[-1]
        assert last["event"] == "no_bus"
        assert "authorization" in str(last["error"]).lower()
