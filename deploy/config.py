"""`cluster.toml`: the defaults, a file of one's own over them, single keys over both."""

import tomllib
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from deploy.errors import ClusterError
from deploy.restart import RestartPolicy, SilencePolicy
from shared.config import AboveZero, ConfigError, Count, NotNegative, Port, settings

DEFAULTS = Path(__file__).parent / "cluster.toml"
ROLES = ("gateway", "tokenizer", "scheduler", "gpu_worker", "kv_tier", "detokenizer")
REDIS_MAX = 16  # servers of ours on one machine
REPLICAS_MAX = 64  # of one role on one machine; more is a slip of the finger


class ClusterTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[cluster]`."""

    host: str
    port: Port  # 0 = any free port
    pool: str
    model: str
    ready_timeout_s: AboveZero
    drain_s: NotNegative
    retire_s: NotNegative
    restart: RestartPolicy = RestartPolicy()
    silence: SilencePolicy = SilencePolicy()


class NatsTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[nats]`."""

    port: Port = 0  # 0 = any free port
    services_url: str = ""  # where services connect, if not to the server itself: to a proxy


class RedisTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[redis]`."""

    maxmemory_mb: Count  # of each server
    servers: Annotated[int, Meta(ge=0, le=REDIS_MAX)] = 1  # each has a share of the blocks
    urls: list[str] = []  # servers of others, instead of our own
    services_socket: str = ""  # where services connect, if not to the first server: to a proxy

    def __post_init__(self) -> None:
        for url in self.urls:
            if not url.startswith(("unix://", "redis://", "rediss://")) or "," in url:
                raise ValueError("urls begin with unix://, redis:// or rediss://, without commas")


class Service(Struct, frozen=True):
    """One role: how many, and what each of them is told."""

    replicas: int
    settings: dict[str, Any]


class ClusterConfig(Struct, frozen=True, kw_only=True):
    """All that a cluster is told."""

    cluster: ClusterTable
    nats: NatsTable
    redis: RedisTable
    services: dict[str, Service]
    port_is_asked: bool  # by the user, so no other will do


def load(file: Path | None, overrides: list[str]) -> ClusterConfig:
    """The defaults, then `file`, then `section.key=value` each; raises `ClusterError`."""
    own: dict[str, Any] = _read(file) if file else {}
    for override in overrides:
        _merge(own, _parse(override))
    tables = _read(DEFAULTS)
    _merge(tables, own)
    services = {role: _service(role, tables.pop(role, {})) for role in ROLES}
    try:
        known = {
            "cluster": settings(tables.pop("cluster"), ClusterTable, "cluster"),
            "nats": settings(tables.pop("nats"), NatsTable, "nats"),
            "redis": settings(tables.pop("redis"), RedisTable, "redis"),
        }
    except ConfigError as error:
        raise ClusterError(f"{error}.") from error
    if tables:
        raise ClusterError(f"There is no section [{next(iter(tables))}].")
    asked = "port" in own.get("cluster", {})
    return ClusterConfig(**known, services=services, port_is_asked=asked)  # type: ignore[arg-type]


def _service(role: str, table: Any) -> Service:
    if not isinstance(table, dict):
        raise ClusterError(f"[{role}] is {table!r}, not a table.")
    table = dict(table)
    replicas = table.pop("replicas", 1)
    if type(replicas) is not int or not 0 <= replicas <= REPLICAS_MAX:
        raise ClusterError(f"[{role}] replicas is {replicas!r}, not 0 to {REPLICAS_MAX}.")
    return Service(replicas, table)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ClusterError(f"Cannot read {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ClusterError(f"{path} is not TOML: {error}.") from error


def _parse(override: str) -> dict[str, Any]:
    """`a.b=1` as nested tables; a value that is no TOML is a string."""
    key, equals, value = override.partition("=")
    *path, last = key.strip().split(".")
    if not equals or not path or not all((*path, last)):
        raise ClusterError(f"{override!r} is not section.key=value.")
    try:
        parsed: Any = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    tables: dict[str, Any] = {last: parsed}
    for name in reversed(path):
        tables = {name: tables}
    return tables


def _merge(base: dict[str, Any], over: dict[str, Any]) -> None:
    """Lay `over` on `base`, table by table."""
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value
