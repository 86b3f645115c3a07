"""What is done to blocks is done to each that is meant, and to nothing else of them."""

import random
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from deploy.servers import Server
from tests.chaos.nemesis_cache import AT_ONCE, evict_half, flip, swap

BLOCKS = {b"kv:%d" % number: random.Random(number).randbytes(200) for number in range(AT_ONCE + 4)}
RNG = random.Random(1)


@pytest.fixture
async def redis(redis_server: Server) -> AsyncIterator[Redis]:
    """A server that holds `BLOCKS`, which expire."""
    async with Redis.from_url(redis_server.url) as redis:
        await redis.flushall()  # of what others left
        for name, value in BLOCKS.items():
            await redis.set(name, value, ex=1000)
        yield redis
        await redis.flushall()


async def held(redis: Redis) -> dict[bytes, bytes]:
    """All that is there; it still expires."""
    names = await redis.keys()
    assert all([await redis.ttl(name) > 0 for name in names])
    return {name: await redis.get(name) for name in names}


async def test_one_bit_of_each_is_flipped(redis: Redis) -> None:
    await flip(redis, [*BLOCKS], RNG)
    after = await held(redis)
    assert after.keys() == BLOCKS.keys()
    for name, value in BLOCKS.items():
        bits = int.from_bytes(value) ^ int.from_bytes(after[name])
        assert (len(after[name]), bits.bit_count()) == (len(value), 1)


async def test_values_are_those_of_others(redis: Redis) -> None:
    await swap(redis, [*BLOCKS], RNG)
    after = await held(redis)
    assert after.keys() == BLOCKS.keys()
    assert sorted(after.values()) == sorted(BLOCKS.values())
    assert not any(after[name] == value for name, value in BLOCKS.items())


async def test_half_is_gone(redis: Redis) -> None:
    await evict_half(redis, [*BLOCKS], RNG)
    after = await held(redis)
    assert len(after) == len(BLOCKS) // 2
    assert after.items() <= BLOCKS.items()
