"""kv_tier against a real Redis: the longest prefix, and every doubt a miss."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import redis.asyncio

from deploy.servers import Server, start_redis
from services.kv_tier.config import Config
from services.kv_tier.service import KvTier
from services.kv_tier.store import BlockStore, block_key
from shared.bus import Delivery
from shared.config import ConfigError, Launch
from shared.errors import Unavailable
from shared.messages import BlocksFound, LookupBlocks, encode
from shared.subjects import inbox
from shared.testing import MemoryBroker, MemoryBus, eventually, running
from tests.services.launches import launch_of

HASHES = [bytes([n]) * 16 for n in range(6)]


async def put(server: Server, *hashes: bytes) -> None:
    client = redis.asyncio.Redis.from_url(server.url)
    for block_hash in hashes:
        await client.set(block_key(block_hash), b"x")
    await client.aclose()


@pytest.fixture
async def store(redis_server: Server) -> AsyncIterator[BlockStore]:
    client = redis.asyncio.Redis.from_url(redis_server.url)
    await client.flushall()
    await client.aclose()
    opened = BlockStore(redis_server.url, Config(answer_s=5.0, connect_s=5.0))
    yield opened
    await opened.close()


async def test_prefix_ends_at_the_first_hole(store: BlockStore, redis_server: Server) -> None:
    """Blocks after a hole are of no use and do not count."""
    await put(redis_server, HASHES[0], HASHES[1], HASHES[3])
    assert await store.count_prefix(HASHES) == 2
    assert await store.count_prefix(HASHES[1:]) == 1
    assert await store.count_prefix(HASHES[2:]) == 0
    assert await store.count_prefix([]) == 0


async def test_long_prompts_take_several_rounds(store: BlockStore, redis_server: Server) -> None:
    """A prefix longer than one round trip's keys is counted to its end."""
    many = [number.to_bytes(16, "big") for number in range(1, 700)]
    await put(redis_server, *many)
    assert await store.count_prefix([*many, b"\xff" * 16]) == 699


async def test_many_lookups_share_few_connections(store: BlockStore, redis_server: Server) -> None:
    """More lookups than connections wait for one, and none is answered with another's reply."""
    await put(redis_server, HASHES[0], HASHES[1])
    asked = [HASHES, HASHES[1:], HASHES[2:]] * 20
    assert await asyncio.gather(*map(store.count_prefix, asked)) == [2, 1, 0] * 20


async def test_no_redis_is_said_at_once(tmp_path: Path) -> None:
    """A socket that nobody listens on is `Unavailable`, without retries."""
    absent = BlockStore(f"unix://{tmp_path}/none.sock", Config())
    with pytest.raises(Unavailable):
        await absent.count_prefix(HASHES)
    await absent.close()


def launch(url: str, **settings: object) -> Launch:
    return launch_of("kv_tier", "kv_tier-0-a", settings, redis_url=url)


class Asker:
    """A worker that asks a kv_tier over a bus in memory."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.bus = MemoryBus(broker)
        self.answers: list[BlocksFound] = []

    async def listen(self) -> None:
        await self.bus.subscribe(inbox("worker-1"), self._on)

    def _on(self, delivery: Delivery) -> None:
        self.answers.append(msgspec.msgpack.decode(delivery.payload, type=BlocksFound))

    def send(self, block_hashes: bytes) -> None:
        message = LookupBlocks(lookup_id=1, worker="worker-1", block_hashes=block_hashes)
        self.bus.publish(inbox("kv_tier-0-a"), encode(message))

    async def ask(self, block_hashes: bytes) -> int:
        self.answers.clear()
        self.send(block_hashes)
        await eventually(lambda: bool(self.answers))
        return self.answers[0].num_blocks


async def test_service_answers_prefix(store: BlockStore, redis_server: Server) -> None:
    """The worker is told the length of the prefix; bytes that are no whole hash are ignored."""
    await put(redis_server, HASHES[0])
    broker = MemoryBroker()
    asker = Asker(broker)
    await asker.listen()
    async with running(KvTier(launch(redis_server.url, answer_s=5.0), MemoryBus(broker))):
        assert await asker.ask(b"".join(HASHES) + b"odd") == 1
        assert await asker.ask(b"") == 0


async def test_a_stopped_service_answers_what_was_asked(
    store: BlockStore, redis_server: Server
) -> None:
    """Also what was on its way when it was told to stop."""
    await put(redis_server, HASHES[0])
    broker = MemoryBroker()
    asker = Asker(broker)
    await asker.listen()
    async with running(
        KvTier(launch(redis_server.url, answer_s=5.0), MemoryBus(broker))
    ) as kv_tier:
        kv_tier.stop()
        await eventually(lambda: kv_tier.draining)
        asker.send(HASHES[0])
    assert [found.num_blocks for found in asker.answers] == [1]


async def test_service_without_redis_answers_miss() -> None:
    """No Redis configured, and a dead Redis, are both an empty cache."""
    for url in ("", "unix:///nowhere/none.sock"):
        broker = MemoryBroker()
        asker = Asker(broker)
        await asker.listen()
        async with running(KvTier(launch(url), MemoryBus(broker))):
            for _ in range(8):
                assert await asker.ask(HASHES[0]) == 0


async def test_hung_redis_opens_the_breaker_and_heals(tmp_path: Path) -> None:
    """A stopped Redis costs misses; the breaker stops asking, and finds it again afterwards."""
    server = start_redis(tmp_path)
    broker = MemoryBroker()
    asker = Asker(broker)
    await asker.listen()
    breaker = {"failures": 2, "window_s": 60.0, "open_s": 0.05}
    tier = KvTier(launch(server.server.url, answer_s=0.2, breaker=breaker), MemoryBus(broker))
    try:
        await put(server.server, HASHES[0])
        async with running(tier):
            os.kill(server.process.pid, signal.SIGSTOP)
            for _ in range(3):
                assert await asker.ask(HASHES[0]) == 0
            assert tier.breaker.opened > 0
            os.kill(server.process.pid, signal.SIGCONT)
            for _ in range(200):
                if await asker.ask(HASHES[0]) == 1:
                    break
                await asyncio.sleep(0.01)
            assert await asker.ask(HASHES[0]) == 1
            assert tier.breaker.state(tier.clock()) == "closed"
    finally:
        server.stop()


async def test_too_many_lookups_are_misses(tmp_path: Path) -> None:
    """Beyond `max_lookups` in hand the answer is a miss at once, and all are answered."""
    server = start_redis(tmp_path)
    broker = MemoryBroker()
    asker = Asker(broker)
    await asker.listen()
    tier = KvTier(launch(server.server.url, answer_s=0.2, max_lookups=2), MemoryBus(broker))
    try:
        await put(server.server, HASHES[0])
        os.kill(server.process.pid, signal.SIGSTOP)
        async with running(tier):
            for _ in range(20):
                asker.send(HASHES[0])
            await eventually(lambda: len(asker.answers) == 20)
            assert tier.failures == 2
            os.kill(server.process.pid, signal.SIGCONT)
    finally:
        server.stop()


def test_unknown_setting_is_named() -> None:
    """A key that does not exist stops the process by name."""
    with pytest.raises(ConfigError, match="answer_ms"):
        KvTier(launch("", answer_ms=3), MemoryBus(MemoryBroker()))
