"""The launch file of a service, and the directory it lies in."""

import errno
import os
import stat
from pathlib import Path

import pytest

from deploy.config import load
from deploy.errors import ClusterError
from deploy.launch import Launcher, environment, new_secret
from deploy.model import Model
from deploy.run_dir import RunDir, disk_error
from deploy.servers import Server
from shared.config import STEP_THREADS, read_launch


def launcher(run_dir: RunDir, *overrides: str) -> Launcher:
    def server(name: str) -> Server:
        return Server(
            name=name,
            command=[],
            run_dir=run_dir.path,
            log=run_dir.log_file(name),
            url=f"{name}://there",
            user="me",
            password="hidden",
        )

    model = Model(Path("/models/tiny.gguf"), "tiny", 1)
    config = load(None, list(overrides))
    return Launcher(
        config,
        model,
        run_dir,
        server("nats"),
        [server("redis"), server("redis-1")],
        7,
        new_secret(),
    )


def test_a_launch_file_tells_a_service_all_and_others_nothing(tmp_path: Path) -> None:
    """It reads back as it was meant, is 0600, and only gateways get the listening socket."""
    run_dir = RunDir(tmp_path / "run")
    with run_dir.held():
        launching = launcher(run_dir, "gateway.ping_s=3")
        for role in ("gateway", "tokenizer"):
            spec = launching.spec(role, 0, lambda: 1)
            name = f"{role}-0"
            assert spec.name == name
            before = os.umask(0)
            command = spec.command(f"{name}-abc123", 9)
            os.umask(before)
            file = Path(command.argv[-1])
            launch = read_launch(file)

            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert (launch.name, launch.instance) == (name, f"{name}-abc123")
            assert (launch.nats_password, launch.status_fd) == ("hidden", 9)
            assert "hidden" not in " ".join((*command.argv, *command.env.values()))
            gateway = name == "gateway-0"
            assert launch.listen_fd == (7 if gateway else None)
            assert command.pass_fds == ((7,) if gateway else ())
            assert launch.settings == ({"drain_s": 600, "ping_s": 3} if gateway else {})
    assert not file.exists()


def test_engines_share_the_cpus_with_as_many_as_there_are_at_their_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with as many as there were when the cluster came up."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(13))
    run_dir = RunDir(tmp_path / "run")
    counts = iter([1, 3])
    with run_dir.held():
        spec = launcher(run_dir).spec("gpu_worker", 0, lambda: next(counts))
        starts = [spec.command("gpu_worker-0-abc123", 9) for _ in range(2)]

    assert [start.env["OMP_NUM_THREADS"] for start in starts] == ["12", "4"]
    assert [start.env[STEP_THREADS] for start in starts] == ["12", "4"]


@pytest.mark.parametrize(
    ("cpus", "engines", "threads"), [(1, 1, 1), (2, 1, 2), (2, 2, 1), (3, 1, 2), (8, 2, 3)]
)
def test_a_compiled_step_leaves_a_cpu_where_there_are_many(
    cpus: int, engines: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two it takes both."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(cpus))
    assert environment("gpu_worker", engines)[STEP_THREADS] == str(threads)


def test_services_can_be_sent_through_proxies(tmp_path: Path) -> None:
    """Services connect where they are told to, with the credentials of the servers behind it."""
    run_dir = RunDir(tmp_path)
    proxied = launcher(
        run_dir, "nats.services_url=nats://127.0.0.1:7", "redis.services_socket=/a b/proxy.sock"
    ).launch("kv_tier", "kv_tier-0", "kv_tier-0-abc123", 9)

    assert (proxied.nats_url, proxied.nats_password) == ("nats://127.0.0.1:7", "hidden")
    assert proxied.redis_url == "unix://:hidden@/a%20b/proxy.sock,redis-1://there"


def test_redis_may_be_of_others(tmp_path: Path) -> None:
    """Then a kv_tier is told of those, and of no server of ours."""
    urls = ["rediss://me:secret@one:6379", "redis://two"]
    launching = launcher(RunDir(tmp_path), f"redis.urls={urls}")
    launch = launching.launch("kv_tier", "kv_tier-0", "kv_tier-0-abc123", 9)
    assert launch.redis_url.split(",") == urls


def test_only_engines_compute_with_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines share all CPUs but one; what the user sets wins."""
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    cpus = len(os.sched_getaffinity(0))

    assert environment("gpu_worker", 1)["OMP_NUM_THREADS"] == str(max(1, cpus - 1))
    assert environment("gpu_worker", 1)["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment("gpu_worker", 10 * cpus)["OMP_NUM_THREADS"] == "1"
    assert environment("tokenizer", 1)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert environment("tokenizer", 1)["OMP_NUM_THREADS"] == "5"


def test_a_held_directory_is_refused_to_others(tmp_path: Path) -> None:
    """One mesh per directory; free again as soon as the first lets go."""
    first, second = RunDir(tmp_path / "run"), RunDir(tmp_path / "run")
    with first.held():
        assert not second.is_free()
        with pytest.raises(ClusterError, match="already up"), second.held():
            pass
    assert second.is_free()


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """A file in the way, or a disk that is full, is one sentence."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match=r"Cannot use .*/file"), RunDir(tmp_path / "file").held():
        pass

    full = disk_error(tmp_path, OSError(errno.ENOSPC, "No space left on device"))
    assert str(full) == f"The disk of {tmp_path} is full."
