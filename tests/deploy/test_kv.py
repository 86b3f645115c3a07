"""`shoal kv` shows what the caches hold, and deletes what it says."""

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from deploy import cli
from deploy.config import ROLES
from deploy.errors import ClusterError
from deploy.kv import HEAD, L2
from services.kv_tier.frame import Frame, write_header
from tests.services.launches import launch_of

SERVICES = [f"{role}.replicas={int(role == 'kv_tier')}" for role in ROLES]


BLOCK, FINGERPRINT, PAYLOAD = b"b" * 16, b"f" * 16, bytes(32)
VALUE = write_header(Frame("raw", "bf16", FINGERPRINT, BLOCK, 32, 32), PAYLOAD) + PAYLOAD


class Cluster:
    """NATS, Redis and a kv_tier, and what `shoal` says of them."""

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

    def kv(self, *arguments: str) -> tuple[int, str]:
        """Exit status and output of one of the commands. Raises `ClusterError`."""
        args = cli.parser().parse_args(["kv", *arguments, "--run-dir", str(self._run_dir)])
        with contextlib.redirect_stdout(io.StringIO()) as out:
            return args.function(args), out.getvalue()

    def json(self, *arguments: str) -> Any:
        return json.loads(self.kv(*arguments, "--json")[1])

    def redis(self) -> Redis:
        launch = json.loads((self._run_dir / "launch" / "kv_tier-0.json").read_bytes())
        return Redis.from_url(launch["redis_url"])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("kv") / "run")
    try:
        started = cluster.shoal("up", "--port", "0", "--no-sample", *SERVICES)
        assert started.returncode == 0, started.stderr
        yield cluster
    finally:
        cluster.shoal("down")


def test_stats_show_each_redis_and_who_uses_it(cluster: Cluster) -> None:
    """Without a password; for people and for programs."""
    with cluster.redis() as redis:
        redis.set("kv:1:00", b"x")
    found = cluster.json("stats")
    [server] = found["l2"]
    assert (server["keys"], server["max_bytes"], server["error"]) == (1, 1024 << 20, "")
    [(instance, counts)] = found["counters"].items()
    assert instance.startswith("kv_tier-0-")
    assert counts["lookups"] == 0
    [line, *_] = cluster.shoal("kv", "stats").stdout.splitlines()
    assert line.startswith("L2  unix:///")
    assert "1 keys" in line
    assert "@" not in line


def test_a_block_is_listed_and_looked_into(cluster: Cluster) -> None:
    """By its header; and when a bit of its payload is another, `get` says so, and `ls`, which reads
    headers alone, does not.
    """
    with cluster.redis() as redis:
        redis.flushall()
        redis.set(f"kv:1:{BLOCK.hex()}", VALUE, px=60_000)
        redis.set(f"kv:1:{bytes(16).hex()}", VALUE)
        listed = {one["block_hash"]: one for one in cluster.json("ls")}
        assert len(cluster.json("ls", "--limit", "1")) == 1
        one, other = listed[BLOCK.hex()], listed[bytes(16).hex()]
        assert (one["codec"], one["dtype"], one["value_bytes"]) == ("raw", "bf16", 64 + 32)
        assert (one["fingerprint"], one["wrong"]) == (FINGERPRINT.hex(), "")
        assert 0 < one["expires_s"] <= 60
        assert (other["expires_s"] < 0, other["wrong"]) == (True, "hash")

        assert cluster.json("get", BLOCK.hex())[0]["wrong"] == ""
        redis.setbit(f"kv:1:{BLOCK.hex()}", 8 * 80, 1)
        code, said = cluster.kv("get", BLOCK.hex())
        assert (code, said.split()[-2:]) == (1, ["wrong", "checksum"])
        assert cluster.kv("ls")[1].splitlines()[0].split() == list(HEAD)
    with pytest.raises(ClusterError, match="No Redis holds block ffff"):
        cluster.kv("get", "ff" * 16)
    with pytest.raises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as said_why:
        cluster.kv("get", "ff")
    assert "'ff' is not 32 hex digits" in said_why.getvalue()


def test_flush_deletes_blocks_alone_and_only_when_meant(cluster: Cluster) -> None:
    with cluster.redis() as redis:
        redis.flushall()
        redis.mset({f"kv:1:{number}": "block" for number in range(1000)} | {"other": "x"})
        refused = cluster.shoal("kv", "flush")
        assert (refused.returncode, redis.dbsize()) == (1, 1001)
        assert "--yes" in refused.stderr
        assert cluster.kv("flush", "--yes") == (0, "1,000 blocks deleted\n")
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
    with pytest.raises(ClusterError, match=r"^No mesh is up"):
        Cluster(tmp_path).kv("stats")
