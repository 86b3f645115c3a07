"""`shoal up` to `shoal down`, as a user does it: the servers alone, which start in a second."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from deploy import control
from deploy.config import ROLES
from deploy.errors import ClusterError

NO_SERVICES = [f"{role}.replicas=0" for role in ROLES]


def shoal(run_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", *arguments, "--run-dir", str(run_dir)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def up(
    run_dir: Path, *options: str, port: str = "0", services: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    none_but = [*NO_SERVICES, *services]
    return shoal(run_dir, "up", "--port", port, "--no-sample", *options, *none_but)


def said(run_dir: Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(shoal(run_dir, "status", "--json").stdout)
    return answer


def of_cluster(run_dir: Path) -> list[psutil.Process]:
    """Every process whose command line names `run_dir`, whoever started it."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and str(run_dir) in " ".join(process.cmdline()):
                found.append(process)
    return found


def left(run_dir: Path) -> list[str]:
    return [path.name for path in run_dir.iterdir() if path.name != "logs"]


async def gone(run_dir: Path) -> None:
    async with asyncio.timeout(20):
        while of_cluster(run_dir) or left(run_dir):
            await asyncio.sleep(0.02)


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    shoal(tmp_path / "run", "down")


def test_up_says_each_stage_and_down_leaves_only_logs(run_dir: Path) -> None:
    """One line per stage, the base URL at the end; afterwards no process and no file but logs."""
    started = up(run_dir)
    assert started.returncode == 0, started.stderr
    status = said(run_dir)

    stages = [line.split()[0] for line in started.stdout.splitlines() if line]
    assert stages == ["model", "servers", "services", "ready"]
    assert f"http://127.0.0.1:{status['port']}/v1" in started.stdout
    assert {p["name"]: p["state"] for p in status["processes"]} == {
        "nats": "ready",
        "redis": "ready",
    }
    assert len(of_cluster(run_dir)) >= 2

    assert shoal(run_dir, "down").returncode == 0
    assert of_cluster(run_dir) == []
    assert left(run_dir) == []
    assert sorted(path.stem for path in (run_dir / "logs").iterdir()) == [
        "nats",
        "redis",
        "supervisor",
    ]


async def test_a_killed_supervisor_leaves_nothing(run_dir: Path) -> None:
    """kill -9: the children die with it, and socket, credentials and data are swept."""
    assert up(run_dir).returncode == 0
    os.kill(said(run_dir)["supervisor_pid"], signal.SIGKILL)

    await gone(run_dir)
    assert up(run_dir).returncode == 0, "the directory can be used again"


async def test_a_stopped_supervisor_can_be_taken_down(run_dir: Path) -> None:
    """A supervisor that hangs does not keep its cluster up."""
    assert up(run_dir).returncode == 0
    os.kill(said(run_dir)["supervisor_pid"], signal.SIGSTOP)

    assert shoal(run_dir, "down").returncode == 0
    assert of_cluster(run_dir) == []
    assert left(run_dir) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_ctrl_c_in_the_foreground_leaves_nothing(run_dir: Path, number: int) -> None:
    """`shoal up --foreground` ends in good order on either signal."""
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "deploy.cli", "up", "--foreground", "--port", "0"],
        *["--run-dir", str(run_dir), *NO_SERVICES],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    async with asyncio.timeout(30):
        while not (await process.stdout.readline()).startswith(b"ready"):
            pass
        process.send_signal(number)
        assert await process.wait() == 0
    await gone(run_dir)


async def test_ctrl_c_while_it_comes_up_leaves_nothing(run_dir: Path) -> None:
    """Interrupting `shoal up` takes the detached supervisor along."""
    process = await asyncio.create_subprocess_exec(
        # A shell that runs the tests in the background has them ignore the signal.
        *["env", "--default-signal=INT", sys.executable, "-m", "deploy.cli", "up", "--port", "0"],
        *["--run-dir", str(run_dir), *NO_SERVICES, "gateway.replicas=1"],  # never ready alone
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    async with asyncio.timeout(30):
        await process.stdout.readline()
        process.send_signal(signal.SIGINT)
        await process.wait()
    await gone(run_dir)


def test_two_clusters_live_side_by_side(tmp_path: Path) -> None:
    """A second run directory is a second mesh, with its own ports and credentials."""
    first, second = tmp_path / "a", tmp_path / "b"
    try:
        assert up(first).returncode == 0
        assert up(second).returncode == 0
        assert said(first)["port"] != said(second)["port"]
        assert said(first)["nats_url"] != said(second)["nats_url"]
        assert (first / "public.json").read_text() != (second / "public.json").read_text()

        assert shoal(first, "down").returncode == 0
        assert said(second)["state"] == "ready"
    finally:
        for run_dir in (first, second):
            assert shoal(run_dir, "down").returncode == 0


def test_one_directory_has_one_mesh(run_dir: Path) -> None:
    """A second `up` in the same directory is refused, and the first goes on."""
    assert up(run_dir).returncode == 0
    again = up(run_dir)

    assert again.returncode == 1
    assert f"already up in {run_dir}" in again.stderr
    assert said(run_dir)["state"] == "ready"


def test_secrets_are_readable_by_their_owner_only(run_dir: Path) -> None:
    """Nothing in the run directory can be read by others, whatever the umask is."""
    before = os.umask(0)
    try:
        assert up(run_dir).returncode == 0
    finally:
        os.umask(before)

    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    for name in ("public.json", "control.sock", "servers/nats.conf", "servers/redis.conf"):
        assert stat.S_IMODE((run_dir / name).stat().st_mode) & 0o077 == 0, name


def test_processes_are_killed_paused_and_resumed_by_name(run_dir: Path) -> None:
    """kill restarts it, pause and resume show in its state; an unknown name lists the known."""
    assert up(run_dir).returncode == 0
    before = {p["name"]: p for p in said(run_dir)["processes"]}
    assert shoal(run_dir, "kill", "nats").returncode == 0
    assert shoal(run_dir, "pause", "redis").returncode == 0
    assert {p["name"]: p["state"] for p in said(run_dir)["processes"]}["redis"] == "paused"
    assert shoal(run_dir, "resume", "redis").returncode == 0
    while any(process["state"] != "ready" for process in said(run_dir)["processes"]):
        pass
    after = {p["name"]: p for p in said(run_dir)["processes"]}

    assert after["nats"]["pid"] != before["nats"]["pid"]
    assert after["nats"]["restarts"] == 1
    assert after["redis"]["pid"] == before["redis"]["pid"]
    unknown = shoal(run_dir, "kill", "gateway-7")
    assert unknown.returncode == 1
    assert "there are: nats, redis" in unknown.stderr


def test_a_server_that_is_stopped_is_found_and_replaced(run_dir: Path) -> None:
    """SIGSTOP from anywhere: no ping is answered, so it is killed and started again."""
    assert up(run_dir, "cluster.silence.limit_s=2.5").returncode == 0
    before = {p["name"]: p["pid"] for p in said(run_dir)["processes"]}
    for pid in before.values():
        os.kill(pid, signal.SIGSTOP)
    after = settled(run_dir, restarts=2)

    assert {p["name"] for p in after} == {"nats", "redis"}
    assert {p["detail"] for p in after} == {"last end: silent for 2.5 s"}
    assert not {p["pid"] for p in after} & set(before.values())


def settled(run_dir: Path, restarts: int) -> list[dict[str, Any]]:
    """The processes, once so many restarts were seen in all and every one is ready."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        processes: list[dict[str, Any]] = said(run_dir)["processes"]
        ready = {p["state"] for p in processes} == {"ready"}
        if ready and sum(p["restarts"] for p in processes) == restarts:
            return processes
    raise AssertionError(processes)


def test_a_mesh_that_lost_a_process_for_good_is_not_ready(run_dir: Path) -> None:
    """`degraded` until a rolling restart brings it back."""
    assert up(run_dir, "cluster.restart.limit=0", services=["kv_tier.replicas=1"]).returncode == 0
    os.kill(said(run_dir)["processes"][-1]["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 30
    while (status := said(run_dir))["processes"][-1]["state"] != "failed":
        assert time.monotonic() < deadline, status
    assert status["state"] == "degraded"

    rolled = shoal(run_dir, "rolling", "kv_tier")
    assert (rolled.returncode, rolled.stdout) == (0, "kv_tier-0 (1 of 1)\n")
    assert said(run_dir)["state"] == "ready"


def test_one_change_at_a_time_and_none_outlives_the_mesh(run_dir: Path) -> None:
    """While one is at work another is refused; `down` ends it, and nothing is left."""
    assert up(run_dir, services=["kv_tier.replicas=1"]).returncode == 0
    first = subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", "scale", "kv_tier=4", "--run-dir", str(run_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert first.stdout is not None
    assert first.stdout.readline() == b"kv_tier: 1 -> 4\n"
    with pytest.raises(ClusterError, match="is at work"):
        control.ask(run_dir, control.Command("rolling"))
    assert shoal(run_dir, "down").returncode == 0

    assert (first.wait(), first.communicate()[1]) == (1, b"shoal: The mesh is going down.\n")
    assert of_cluster(run_dir) == []
    assert left(run_dir) == []


def test_ctrl_c_ends_a_rolling_restart_after_the_process_at_work(run_dir: Path) -> None:
    """The supervisor sees that nobody listens any more; the next change may come."""
    assert up(run_dir, services=["kv_tier.replicas=3"]).returncode == 0
    before = [p["pid"] for p in said(run_dir)["processes"][2:]]
    rolling = subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", "rolling", "--run-dir", str(run_dir)],
        stdout=subprocess.PIPE,
    )
    assert rolling.stdout is not None
    assert rolling.stdout.readline() == b"kv_tier-0 (1 of 3)\n"
    rolling.kill()
    rolling.communicate()
    deadline = time.monotonic() + 60
    while "is at work" in (told := shoal(run_dir, "scale", "kv_tier=3").stderr):
        assert time.monotonic() < deadline
    assert told == ""
    after = [p["pid"] for p in said(run_dir)["processes"][2:]]
    assert after[0] != before[0]
    assert after[1:] == before[1:]


def test_a_taken_port_is_one_sentence(run_dir: Path) -> None:
    """A port asked for and taken is refused by number."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = up(run_dir, port=str(port))

    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert f"Port {port} of 127.0.0.1 is taken" in refused.stderr


async def test_a_service_that_cannot_run_ends_up(run_dir: Path) -> None:
    """The mesh that cannot come up says which process and why, and leaves nothing."""
    refused = up(run_dir, "gateway.no_such_key=1", services=["gateway.replicas=1"])

    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert "gateway-0" in refused.stderr
    assert "no_such_key" in refused.stderr
    await gone(run_dir)


@pytest.mark.parametrize("verb", ["status", "chat", "kill", "rolling"])
def test_what_needs_a_mesh_says_that_none_is_up(run_dir: Path, verb: str) -> None:
    """Commands to a mesh that is not up say so, in one sentence."""
    refused = shoal(run_dir, verb, *(["nats"] if verb == "kill" else []))

    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert f"No mesh is up in {run_dir}" in refused.stderr


def test_a_reader_that_goes_away_costs_only_the_showing(run_dir: Path) -> None:
    """`shoal up | head -1`: no traceback, and the mesh is up; so with `status | head`."""
    for command in (["up", "--port", "0", "--no-sample", *NO_SERVICES], ["status"]):
        read_end, write_end = os.pipe()
        os.close(read_end)
        done = subprocess.run(
            [sys.executable, "-m", "deploy.cli", *command, "--run-dir", str(run_dir)],
            stdout=write_end,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
        os.close(write_end)
        assert (done.returncode, done.stderr) == (141, b"")
        while said(run_dir)["state"] != "ready":
            pass


@pytest.mark.parametrize("verb", ["up", "status", "down", "logs"])
def test_a_file_is_no_run_directory(tmp_path: Path, verb: str) -> None:
    """A run directory that is a file is one sentence, whatever is asked."""
    (tmp_path / "file").write_text("")
    refused = shoal(tmp_path / "file", verb)

    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert str(tmp_path / "file") in refused.stderr


def test_down_twice_is_fine(run_dir: Path) -> None:
    """Taking down what is not up is no error, so scripts need not ask first."""
    assert shoal(run_dir, "down").returncode == 0
    assert not run_dir.exists()


def test_a_directory_full_of_other_things_keeps_them(run_dir: Path) -> None:
    """Only what a mesh wrote is ever removed."""
    run_dir.mkdir()
    (run_dir / "thesis.tex").write_text("years of work")
    assert up(run_dir).returncode == 0
    assert shoal(run_dir, "down").returncode == 0

    assert (run_dir / "thesis.tex").read_text() == "years of work"


def test_nonsense_on_the_control_socket_is_answered(run_dir: Path) -> None:
    """A peer that speaks no protocol gets an error and hurts nobody."""
    assert up(run_dir).returncode == 0
    for line in (b"hello\n", b'{"verb":"explode"}\n', b"\n"):
        with control.short_path(run_dir) as path, socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(10)
            peer.connect(path)
            peer.sendall(line)
            assert "error" in json.loads(peer.makefile("rb").readline())

    assert said(run_dir)["state"] == "ready"
