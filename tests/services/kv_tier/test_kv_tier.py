"""kv_tier against a real Redis: blocks from slots to L2 and back, and every doubt a miss."""

import os
import signal
from pathlib import Path

import pytest
from redis import Redis

from deploy import cluster
from deploy.servers import Running, Server, start
from services.kv_tier.blocks import block_key
from shared.config import ConfigError
from shared.messages import LookupBlocks
from shared.slots import host
from shared.testing import MemoryBroker, eventually, running
from tests.services.kv_tier.kit import (
    FINGERPRINT,
    HASHES,
    Lender,
    content,
    key,
    serving,
    tier_on,
    until_quiet,
)

ALL = range(8)


async def test_blocks_come_back_as_they_went(
    redis: Redis, redis_server: Server, broker: MemoryBroker, worker: Lender
) -> None:
    """Up to the first hole; no more than there are slots; none where it is not worth it."""
    async with serving(tier_on(broker, redis_server.url)) as tier:
        assert await worker.store(0, 1, 2, 4) == 4
        assert await worker.load(ALL) == [content(number) for number in (0, 1, 2)]
        found = await worker.ask(worker.lookup(HASHES, 2))
        assert (found.num_blocks, found.num_loaded) == (3, 2)
        found = await worker.ask(worker.lookup(HASHES, 3, min_blocks=4))
        assert (found.num_blocks, found.num_loaded) == (3, 0)
        assert await worker.load(ALL, fingerprint=b"another model...") == []
        assert tier.stats()["loaded_blocks"] == 5


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [
        ("raw", "fp32"),
        ("zstd", "bf16"),
        ("zstd", "digests"),
        ("int8", "bf16"),
        ("int8", "fp32"),
        ("int8", "digests"),
    ],
)
async def test_a_reader_needs_no_setting(
    codec: str, dtype: str, redis: Redis, redis_server: Server, broker: MemoryBroker, worker: Lender
) -> None:
    """The frame says how it was written. Zeros: every codec keeps them, and makes them small."""
    async with serving(tier_on(broker, redis_server.url, codec=codec)):
        offer = worker.offer([0], dtype=dtype)
        worker.slots.payload(offer.slots[0])[:] = bytes(4096)
        await worker.ask(offer)
    is_small = redis.strlen(key(0)) < 4096
    assert is_small == (codec == "zstd" or (codec == "int8" and dtype != "digests"))
    async with serving(tier_on(broker, redis_server.url)):
        assert await worker.load([0]) == [bytes(4096)]


async def test_a_lookup_without_slots_counts(
    redis: Redis, redis_server: Server, broker: MemoryBroker, worker: Lender
) -> None:
    """As whoever has no memory to lend asks; bytes that are no whole hash are ignored."""
    async with serving(tier_on(broker, redis_server.url)) as tier:
        await worker.store(0, 1)
        packed = b"".join(HASHES) + b"odd"
        assert (await worker.ask(worker.lookup([], block_hashes=packed))).num_blocks == 2
        assert (await worker.ask(worker.lookup([]))).num_blocks == 0
        unknown = LookupBlocks(lookup_id=99, worker=worker.name, block_hashes=b"x" * 64)
        assert (await worker.ask(unknown)).num_blocks == 0
        assert tier.stats()["misses"] == 2


async def test_long_prompts_take_several_rounds(
    redis: Redis, redis_server: Server, broker: MemoryBroker, worker: Lender
) -> None:
    """A prefix longer than one round trip's keys is counted to its end."""
    many = [number.to_bytes(16, "big") for number in range(1, 700)]
    for name in many:
        redis.set(block_key(FINGERPRINT, name), b"x")
    async with serving(tier_on(broker, redis_server.url)):
        found = await worker.ask(worker.lookup([*many, b"\xff" * 16]))
        assert found.num_blocks == 699


def flip(redis: Redis, number: int, bit: int) -> None:
    redis.setbit(key(number), bit, 1 - redis.getbit(key(number), bit))


def swap(redis: Redis, one: int, other: int) -> None:
    redis.rename(key(one), "x")
    redis.rename(key(other), key(one))
    redis.rename("x", key(other))


@pytest.mark.parametrize(
    ("harm", "reason", "left"),
    [
        (lambda redis: flip(redis, 2, 8 * 1000), "rejected_checksum", 2),
        (lambda redis: flip(redis, 2, 0), "rejected_magic", 2),
        (lambda redis: flip(redis, 2, 8 * 20), "rejected_fingerprint", 2),
        (lambda redis: swap(redis, 2, 5), "rejected_hash", 2),
        (lambda redis: redis.set(key(1), redis.get(key(1))[:-1]), "rejected_short", 1),
        (lambda redis: redis.append(key(1), "more"), "rejected_length", 1),
        (lambda redis: redis.set(key(1), ""), "rejected_short", 1),
        (lambda redis: redis.set(key(3), "x" * 300_000), "rejected_magic", 3),
        (lambda redis: redis.unlink(*[key(number) for number in range(1, 8, 2)]), "", 1),
    ],
    ids=["payload", "magic", "header", "swapped", "cut", "longer", "empty", "foreign", "half gone"],
)
async def test_what_is_not_as_it_was_is_a_miss(
    harm: object,
    reason: str,
    left: int,
    redis: Redis,
    redis_server: Server,
    broker: MemoryBroker,
    worker: Lender,
) -> None:
    """The prefix ends before it; it is counted by reason, deleted, and can be written again."""
    async with serving(tier_on(broker, redis_server.url)) as tier:
        assert await worker.store(*ALL) == 8
        harm(redis)  # type: ignore[operator]
        assert await worker.load(ALL) == [content(number) for number in range(left)]
        if reason:
            assert tier.stats()[reason] >= 1
            assert not redis.exists(key(left))
        assert await worker.store(*ALL) == 8
        assert await worker.load(ALL) == [content(number) for number in ALL]


async def test_another_size_of_block_is_a_miss(
    redis: Redis, redis_server: Server, broker: MemoryBroker, worker: Lender
) -> None:
    """Even of the same name."""
    other = await Lender(broker, slot_bytes=8192).listen()
    async with serving(tier_on(broker, redis_server.url)) as tier:
        await worker.store(0)
        message = other.lookup(HASHES[:1], 1)
        other.send(message)
        await until_quiet(tier)
        await eventually(lambda: tier.stats().get("rejected_length", 0) == 1)
        assert other.slots.returned(message.slots)


@pytest.mark.parametrize(
    ("admission", "first", "second", "loaded"),
    [
        ("second_use", 120, 3600, 3600),
        ("always", 3600, 3600, 3600),
        ("never", 120, 120, 120),
    ],
)
async def test_what_is_kept_for_how_long(
    admission: str,
    first: int,
    second: int,
    loaded: int,
    redis: Redis,
    redis_server: Server,
    broker: MemoryBroker,
    worker: Lender,
) -> None:
    """Within the jitter: new to L2, written a second time, loaded; running legs only prolong."""

    def near(number: int, seconds: int) -> bool:
        return abs(redis.pttl(key(number)) / 1000 - seconds) <= 0.1 * seconds + 1

    async with serving(tier_on(broker, redis_server.url, admission=admission)):
        await worker.store(0, 1)
        assert near(0, first)
        await worker.store(0)
        assert near(0, second)
        await worker.load([1])
        assert near(1, loaded)
        redis.pexpire(key(1), 5000)
        used = worker.offer([], used=b"".join(HASHES))
        await worker.ask(used)
        assert near(0, second)
        assert near(1, 120)


async def test_a_user_needs_few_rights(own: Running, broker: MemoryBroker, worker: Lender) -> None:
    """Those that `deploy/cluster.toml` names, and no more."""
    told = Path(cluster.__file__).with_name("cluster.toml").read_text()
    [rights] = [line[1:].split() for line in told.splitlines() if line.startswith("#   resetkeys")]
    with Redis.from_url(own.server.url) as redis:
        redis.execute_command("ACL", "SETUSER", "shoal", "on", ">pass", *rights)
        url = own.server.url.replace(f":{own.server.password}@", "shoal:pass@")
        async with serving(tier_on(broker, url)) as tier:
            assert await worker.store(0, 1) == 2
            assert await worker.ask(worker.offer([], used=HASHES[0]))
            flip(redis, 1, 8 * 100)
            assert await worker.load(ALL) == [content(0)]
            assert not redis.exists(key(1))
            assert tier.stats()["failures"] == 0


async def test_a_full_redis_is_only_counted(
    own: Running, broker: MemoryBroker, worker: Lender
) -> None:
    """What it has is still read, and its breaker stays closed."""
    async with serving(tier_on(broker, own.server.url)) as tier:
        assert await worker.store(0, 1) == 2
        with Redis.from_url(own.server.url) as redis:
            redis.config_set("maxmemory-policy", "noeviction")
            redis.config_set("maxmemory", 1)
        for _ in range(8):
            assert await worker.store(2, 3) == 0
        assert await worker.load(ALL) == [content(0), content(1)]
        assert tier.stats()["refused_blocks"] == 16
        assert tier.stats()["breaker_opened"] == 0


async def test_without_redis_all_is_a_miss(broker: MemoryBroker, worker: Lender) -> None:
    """None configured, and none there."""
    for urls in ([], ["unix:///nowhere/none.sock"]):
        async with serving(tier_on(broker, *urls)):
            for _ in range(7):
                assert await worker.store(0) == 0
                assert await worker.load(ALL) == []


async def test_a_hung_redis_opens_the_breaker_and_heals(
    own: Running, broker: MemoryBroker, worker: Lender
) -> None:
    """Lookups end in time, then at once; afterwards the blocks are back."""
    breaker = {"failures": 2, "window_s": 60.0, "open_s": 0.05}
    tier = tier_on(broker, own.server.url, answer_s=0.1, store_s=0.1, breaker=breaker)
    async with serving(tier):
        await worker.store(0)
        os.kill(own.process.pid, signal.SIGSTOP)
        for _ in range(3):
            assert await worker.load([0]) == []
            assert await worker.store(1) == 0
        assert tier.stats()["breaker_opened"] > 0
        os.kill(own.process.pid, signal.SIGCONT)
        for _ in range(200):
            if await worker.load([0]):
                break
        assert await worker.load([0]) == [content(0)]


async def test_a_dead_server_is_a_smaller_cache(
    own: Running, redis: Redis, redis_server: Server, broker: MemoryBroker, worker: Lender
) -> None:
    """Two hold a share each; without one, the blocks of the other are still found."""
    tier = tier_on(broker, own.server.url, redis_server.url, breaker={"failures": 1})
    async with serving(tier):
        assert await worker.store(*range(32)) == 32
        here = [number for number in range(32) if redis.exists(key(number))]
        there = [number for number in range(32) if number not in here]
        assert here
        assert there
        own.stop()
        for number in there:
            assert await worker.load([number]) == []
        assert await worker.load(here) == [content(number) for number in here]
        assert tier.stats()["breaker_opened"] >= 1


async def test_a_restarted_redis_is_found(
    own: Running, broker: MemoryBroker, worker: Lender
) -> None:
    """Connections of before are all thrown away after one failure."""
    async with serving(tier_on(broker, own.server.url)) as tier:
        messages = [worker.lookup(HASHES) for _ in range(9)]
        for message in messages:
            worker.send(message)  # over all connections
        for message in messages:
            await worker.answered(message)
        own.stop()
        again = start(own.server)
        try:
            assert await worker.load([0]) == []
            assert await worker.store(0) == 1
            assert await worker.load([0]) == [content(0)]
            assert tier.stats()["failures"] == 1
        finally:
            again.stop()


async def test_a_stopped_service_does_what_was_asked(
    redis: Redis, redis_server: Server, broker: MemoryBroker, worker: Lender
) -> None:
    """Also what was on its way when it was told to stop."""
    async with running(tier_on(broker, redis_server.url)) as tier:
        tier.stop()
        await eventually(lambda: tier.draining)
        offer = worker.offer([0])
        worker.send(offer)
    assert (await worker.answered(offer)).num_blocks == 1


async def test_its_beat_says_where_it_is(broker: MemoryBroker) -> None:
    """Only workers of its host can lend it memory; without a server nobody is to ask."""
    beat = tier_on(broker, "unix:///nowhere").beat()
    assert (beat.host, beat.pid) == (host(), os.getpid())
    assert tier_on(broker).beat().host == ""


@pytest.mark.parametrize(
    ("urls", "settings", "named"),
    [
        ([], {"answer_ms": 3}, "answer_ms"),
        ([], {"codec": "zip"}, "codec"),
        (["http://x"], {}, "redis_url"),
        (["redis://"], {}, "redis_url"),
    ],
)
def test_a_bad_setting_is_named(urls: list[str], settings: dict[str, object], named: str) -> None:
    """It stops the process."""
    with pytest.raises(ConfigError, match=named):
        tier_on(MemoryBroker(), *urls, **settings)
