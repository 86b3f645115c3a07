"""What a cluster is told: defaults, a file over them, single keys over both."""

from pathlib import Path

import pytest

from deploy.config import ROLES, load
from deploy.errors import ClusterError


def test_the_defaults_are_a_whole_cluster() -> None:
    """Every role is there, on loopback, with a standby scheduler."""
    config = load(None, [])

    assert set(config.services) == set(ROLES)
    assert config.cluster.host == "127.0.0.1"
    assert config.services["scheduler"].replicas == 2
    assert all(service.replicas >= 1 for service in config.services.values())
    assert not config.port_is_asked


def test_a_file_changes_only_what_it_names(tmp_path: Path) -> None:
    """Keys beside the changed one keep their defaults; keys on the command line win."""
    file = tmp_path / "mine.toml"
    file.write_text("[cluster]\nport = 9000\n[gpu_worker]\nreplicas = 3\nmax_legs = 8\n")
    config = load(file, ["gpu_worker.replicas=2", "gpu_worker.sim.step_ms=5"])

    assert config.cluster.port == 9000
    assert config.port_is_asked
    assert config.cluster.drain_s == load(None, []).cluster.drain_s
    assert config.services["gpu_worker"].replicas == 2
    assert config.services["gpu_worker"].settings == {"max_legs": 8, "sim": {"step_ms": 5}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("gateway.x=1", 1),
        ("gateway.x=true", True),
        ('gateway.x="1"', "1"),
        ("gateway.x=sim", "sim"),
        ("gateway.x=a=b", "a=b"),
        ("gateway.x=", ""),
        ("gateway.x=[1, 2]", [1, 2]),
    ],
)
def test_values_are_toml_or_else_text(text: str, value: object) -> None:
    """What reads as TOML is TOML; a bare word is a string."""
    assert load(None, [text]).services["gateway"].settings["x"] == value


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["cluster.prot=1"], "prot"),
        (["cluster.port=http"], r"\[cluster\].*port"),
        (["cluster.port=99999"], r"\[cluster\].*port"),
        (["cluster.drain_s=-1"], "drain_s"),
        (["cluster.restart.limits=1"], "limits"),
        (["redis.maxmemory=1"], "maxmemory"),
        (["redis.servers=-1"], r"\[redis\].*servers"),
        (['redis.urls=["http://x"]'], r"\[redis\] urls"),
        (["nats.port=-1"], r"\[nats\].*port"),
        (["gpu_wroker.replicas=1"], r"\[gpu_wroker\]"),
        (["gateway.replicas=-1"], r"\[gateway\] replicas"),
        (["gateway.replicas=1000"], r"\[gateway\] replicas"),
        (["gateway.replicas=true"], r"\[gateway\] replicas"),
        (["port=1"], "section.key=value"),
        (["gateway.replicas"], "section.key=value"),
        (["gateway..x=1"], "section.key=value"),
    ],
)
def test_a_wrong_key_is_named(overrides: list[str], words: str) -> None:
    """A key or value that means nothing stops the cluster and is named."""
    with pytest.raises(ClusterError, match=words):
        load(None, overrides)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Missing, not TOML, not text: each is a sentence with the path."""
    with pytest.raises(ClusterError, match=r"Cannot read .*none.toml"):
        load(tmp_path / "none.toml", [])
    for content in (b"gateway = 5", b"cluster = 5"):
        file = tmp_path / "flat.toml"
        file.write_bytes(content)
        with pytest.raises(ClusterError, match=r"\[(gateway|cluster)\]"):
            load(file, [])
    for content in (b"[cluster", b"\xff\xfe"):
        file = tmp_path / "bad.toml"
        file.write_bytes(content)
        with pytest.raises(ClusterError, match=r"bad.toml is not TOML"):
            load(file, [])
