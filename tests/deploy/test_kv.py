"""`shoal kv` shows what the caches hold, and deletes what it says."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from deploy.config import ROLES
from deploy.errors import ClusterError
from deploy.kv import L2
from tests.services.launches import launch_of

SERVICES = [f"{role}.replicas={int(role == 'kv_tier')}" for role in ROLES]


class Cluster:
    """NATS, Redis and a kv_tier."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def shoal(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "deploy.cli", *arguments, "--run-dir", str(self._run_dir)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def said(self, *arguments: str) -> str:
        told = self.shoal(*arguments)
        assert told.returncode == 0, told.stderr
        return told.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self.said(*arguments, "--json"))

    def redis(self) -> Redis:
        launch = json.loads((self._run_dir / "launch" / "kv_tier-0.json").read_bytes())
        return Redis.from_url(launch["redis_url"])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("kv") / "run")
    try:
        cluster.said("up", "--port", "0", "--no-sample", *SERVICES)
        yield cluster
    finally:
        cluster.shoal("down")


def test_stats_show_each_redis_and_who_uses_it(cluster: Cluster) -> None:
    """Without a password; for people and for programs."""
    with cluster.redis() as redis:
        redis.set("kv:1:00", b"x")
    found = cluster.json("kv", "stats")
    [server] = found["l2"]
    assert (server["keys"], server["max_bytes"], server["error"]) == (1, 256 << 20, "")
    [(instance, counts)] = found["counters"].items()
    assert instance.startswith("kv_tier-0-")
    assert counts["lookups"] == 0
    [line, *_] = cluster.said("kv", "stats").splitlines()
    assert line.startswith("L2  unix:///")
    assert "1 keys" in line
    assert "@" not in line


def test_flush_deletes_blocks_alone_and_only_when_meant(cluster: Cluster) -> None:
    with cluster.redis() as redis:
        redis.flushall()
        redis.mset({f"kv:1:{number}": "block" for number in range(1000)} | {"other": "x"})
        refused = cluster.shoal("kv", "flush")
        assert (refused.returncode, redis.dbsize()) == (1, 1001)
        assert "--yes" in refused.stderr
        assert cluster.said("kv", "flush", "--yes") == "1,000 blocks deleted\n"
        assert redis.keys() == [b"other"]


def test_a_redis_that_is_away_is_said() -> None:
    """In its row of the statistics; elsewhere it is one sentence."""
    l2 = L2(launch_of("kv_tier", "kv_tier-0-a", {}, redis_url="unix://:secret@/nowhere.sock"))
    [server] = l2.servers()
    assert server.url == "unix:///nowhere.sock"
    assert "No such file" in server.error
    with pytest.raises(ClusterError, match=r"^Redis at unix:///nowhere.sock: .*No such file"):
        l2.flush()


def test_without_a_mesh_there_is_nothing_to_show(tmp_path: Path) -> None:
    told = Cluster(tmp_path).shoal("kv", "stats")
    assert (told.returncode, told.stderr.split()[:4]) == (1, ["shoal:", "No", "mesh", "is"])
