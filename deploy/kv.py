"""`shoal kv`: what the caches of a mesh hold, seen past its services, with their credentials.

Nothing here is on the way of a request.
"""

import argparse
import asyncio
import contextlib
import itertools
import sys
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import Struct
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from deploy import control
from deploy.errors import ClusterError
from deploy.run_dir import RunDir
from services.kv_tier import frame
from shared.config import Launch, read_launch
from shared.errors import MeshError
from shared.kv import BlockHash
from shared.nats_bus import NatsBus

KEYS = "kv:*"  # all that is ours
AT_ONCE = 256  # keys in one round trip
SCAN = 1000  # keys that Redis looks at in one round trip
ANSWER_S = 3.0  # of Redis, and of each service
SHOWN = {"kv_tier": ("",), "gpu_worker": ("engine_l1", "engine_l2", "engine_recomputed")}
"""Roles that know of caches, and how those of their counters begin that tell of them."""


class Server(Struct, frozen=True, kw_only=True):
    """One Redis; `error` = why nothing is known of it."""

    url: str
    error: str = ""
    keys: int = 0
    used_bytes: int = 0
    max_bytes: int = 0
    evicted: int = 0
    expired: int = 0


class Worker(Struct, frozen=True, kw_only=True):
    """The L1 of one worker, in blocks."""

    name: str
    total: int
    free: int  # or cached: what a new leg may have


class Stats(Struct, frozen=True, kw_only=True):
    """What `shoal kv stats` says; counters by instance."""

    l2: list[Server]
    l1: list[Worker]
    counters: dict[str, dict[str, int]]


class Stored(Struct, frozen=True, kw_only=True):
    """One block in L2; `wrong` = why nobody would believe it."""

    block_hash: str
    redis: str
    value_bytes: int
    expires_s: float  # below 0 = never
    codec: str = ""
    dtype: str = ""
    fingerprint: str = ""
    decoded_bytes: int = 0
    wrong: str = ""


class L2:
    """The Redis servers of one cluster. All but `servers` raises `ClusterError`."""

    def __init__(self, launch: Launch) -> None:
        self._servers = {
            _shown(url): _connection(url) for url in launch.redis_url.split(",") if url
        }

    def servers(self) -> list[Server]:
        """One each, also of those that do not answer."""
        return [_server(url, redis) for url, redis in self._servers.items()]

    def blocks(self) -> Iterator[Stored]:
        """Every block, in no order, by its header alone."""
        for url, redis, names in self._names():
            with _translated(url):
                pipeline = redis.pipeline(transaction=False)
                for name in names:
                    pipeline.getrange(name, 0, frame.HEADER - 1)
                    pipeline.strlen(name)
                    pipeline.pttl(name)
                told = pipeline.execute()
            for name, *answers in zip(names, told[::3], told[1::3], told[2::3], strict=True):
                header, size, expires_ms = answers
                if size:  # else it has just expired
                    yield _stored(url, name, header, size, expires_ms)

    def find(self, block_hash: BlockHash) -> list[Stored]:
        """The block on each server that has it, its payload checked, too."""
        found = []
        for url, redis in self._servers.items():
            with _translated(url):
                for name in redis.scan_iter(f"{KEYS}{block_hash.hex()}", count=SCAN):
                    value, expires_ms = redis.get(name), redis.pttl(name)
                    if not isinstance(value, bytes):  # it has just expired
                        continue
                    stored = _stored(url, name, value[: frame.HEADER], len(value), expires_ms)
                    header, payload = value[: frame.HEADER], memoryview(value)[frame.HEADER :]
                    wrong = stored.wrong or frame.check_payload(header, payload) or ""
                    found.append(msgspec.structs.replace(stored, wrong=wrong))
        return found

    def flush(self) -> int:
        """Delete every block, and nothing else; how many there were."""
        deleted = 0
        for url, redis, names in self._names():
            with _translated(url):
                deleted += redis.unlink(*names)
        return deleted

    def _names(self) -> Iterator[tuple[str, Redis, list[bytes]]]:
        for url, redis in self._servers.items():
            names = redis.scan_iter(KEYS, count=AT_ONCE)
            while True:
                with _translated(url):
                    some = list(itertools.islice(names, AT_ONCE))
                if not some:
                    break
                yield url, redis, some


def _server(url: str, redis: Redis) -> Server:
    try:
        info, keys = redis.info(), redis.dbsize()
    except RedisError as error:
        return Server(url=url, error=str(error))
    return Server(
        url=url,
        keys=keys,
        used_bytes=info["used_memory"],
        max_bytes=info["maxmemory"],
        evicted=info["evicted_keys"],
        expired=info["expired_keys"],
    )


def _stored(url: str, name: bytes, header: bytes, size: int, expires_ms: int) -> Stored:
    """What a header says of the block that the key names."""
    block_hash = name.rpartition(b":")[2].decode(errors="replace")
    told = frame.read_header(header, size)
    stored = Stored(block_hash=block_hash, redis=url, value_bytes=size, expires_s=expires_ms / 1000)
    if isinstance(told, str):
        return msgspec.structs.replace(stored, wrong=told)
    return msgspec.structs.replace(
        stored,
        codec=told.codec,
        dtype=told.dtype,
        fingerprint=told.fingerprint.hex(),
        decoded_bytes=told.decoded_bytes,
        wrong="" if told.block_hash.hex() == block_hash else "hash",
    )


def _connection(url: str) -> Redis:
    return Redis.from_url(
        url,
        socket_timeout=ANSWER_S,
        socket_connect_timeout=ANSWER_S,
        retry=Retry(NoBackoff(), 0),
    )


def _shown(url: str) -> str:
    """`url` without its password."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{unquote(parts.path)}"


@contextlib.contextmanager
def _translated(url: str) -> Iterator[None]:
    """What Redis said, as a sentence for the person at the terminal."""
    try:
        yield
    except RedisError as error:
        raise ClusterError(f"Redis at {url}: {error}.") from error


def launch_of(run_dir: RunDir) -> Launch:
    """What the services of a running mesh are told. Raises `ClusterError` where none is up."""
    control.status(run_dir.path)
    for file in sorted((run_dir.path / "launch").glob("*.json")):
        return read_launch(file)
    raise ClusterError(f"The mesh in {run_dir.path} has no services.")


def workers(status: control.ClusterStatus) -> list[Worker]:
    """The L1 of each worker that runs."""
    return [
        Worker(name=p.name, total=int(p.extra["total_blocks"]), free=int(p.extra["free_blocks"]))
        for p in status.processes
        if "total_blocks" in p.extra
    ]


async def counters(launch: Launch, status: control.ClusterStatus) -> dict[str, dict[str, int]]:
    """What kv_tiers and workers have counted of caches, by instance; nothing of one that is silent.
    Raises `ClusterError` when the bus is.
    """
    try:
        bus = await NatsBus.connect(
            launch.nats_url, launch.nats_user, launch.nats_password, name="shoal-kv"
        )
    except MeshError as error:
        raise ClusterError(f"No connection to NATS: {error}.") from error
    try:
        return dict(
            await asyncio.gather(
                *(
                    _counted(bus, role, process.instance)
                    for process in status.processes
                    if (role := process.name.rpartition("-")[0]) in SHOWN and process.pid
                )
            )
        )
    finally:
        await bus.close()


async def _counted(bus: NatsBus, role: str, instance: str) -> tuple[str, dict[str, int]]:
    subject = f"$SRV.STATS.shoal-{role.replace('_', '-')}.{instance}"
    try:
        answer = await bus.request(subject, b"", ANSWER_S)
    except MeshError:
        return instance, {}
    data: dict[str, int] = msgspec.json.decode(answer.payload)["endpoints"][0]["data"]
    return instance, {name: n for name, n in data.items() if name.startswith(SHOWN[role])}


# --- commands ------------------------------------------------------------------------------------


def stats(args: argparse.Namespace) -> int:
    """What each cache holds, and what was asked of it."""
    launch, status = launch_of(args.run_dir), control.status(args.run_dir.path)
    found = Stats(
        l2=L2(launch).servers(),
        l1=workers(status),
        counters=asyncio.run(counters(launch, status)),
    )
    _write(as_json(found) if args.json else stats_as_text(found))
    return 0


def ls(args: argparse.Namespace) -> int:
    """Some blocks, by their headers."""
    found = list(itertools.islice(L2(launch_of(args.run_dir)).blocks(), args.limit))
    _write(as_json(found) if args.json else "\n".join(control.aligned([HEAD, *map(row, found)])))
    return 0


def get(args: argparse.Namespace) -> int:
    """One block, its payload checked, too; 1 where it is not there or not to be believed."""
    found = L2(launch_of(args.run_dir)).find(args.hash)
    if not found:
        raise ClusterError(f"No Redis holds block {args.hash.hex()}.")
    if args.json:
        _write(as_json(found))
    else:
        for stored in found:
            fields = msgspec.structs.asdict(stored).items()
            _write("\n".join(control.aligned([(name, str(value)) for name, value in fields])))
    return int(any(stored.wrong for stored in found))


def flush(args: argparse.Namespace) -> int:
    """Delete all blocks in L2."""
    l2 = L2(launch_of(args.run_dir))
    if not args.yes:
        raise ClusterError("This deletes every block in L2; say --yes. Nothing but time is lost.")
    _write(f"{l2.flush():,} blocks deleted")
    return 0


HEAD = ("BLOCK", "BYTES", "CODEC", "DTYPE", "FINGERPRINT", "EXPIRES", "WRONG")


def row(stored: Stored) -> tuple[str, ...]:
    """A line of `shoal kv ls`."""
    return (
        stored.block_hash,
        f"{stored.value_bytes:,}",
        stored.codec,
        stored.dtype,
        stored.fingerprint[:8],
        f"{stored.expires_s:.0f} s" if stored.expires_s >= 0 else "never",
        stored.wrong,
    )


def as_json(found: Struct | list[Stored]) -> str:
    """For programs."""
    return msgspec.json.format(msgspec.json.encode(found)).decode()


def stats_as_text(found: Stats) -> str:
    """For people; what was never counted is left out."""
    rows = []
    for server in found.l2:
        said = server.error or (
            f"{server.keys:,} keys, {_mb(server.used_bytes)} of {_mb(server.max_bytes)},"
            f" {server.evicted:,} evicted, {server.expired:,} expired"
        )
        rows.append(("L2", server.url, said))
    rows += [
        ("L1", worker.name, f"{worker.total:,} blocks, {worker.free:,} of them free or cached")
        for worker in found.l1
    ]
    lines = control.aligned(rows)
    for instance, counts in found.counters.items():
        shown = [("", name, f"{count:,}") for name, count in counts.items() if count]
        lines += [instance, *control.aligned(shown)]
    return "\n".join(lines)


def _mb(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
