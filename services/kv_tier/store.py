"""Blocks in Redis: one key per block, one value per key. The only module that knows Redis.

Any doubt is a miss: whatever goes wrong here is `Unavailable`, which the caller turns into one.
"""

import asyncio
from collections.abc import Sequence

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from services.kv_tier.config import Config
from shared.errors import Unavailable
from shared.kv import BlockHash

FORMAT = 1  # of the value; another format is another key
_ROUND = 256  # keys asked for in one round trip


def block_key(block_hash: BlockHash) -> bytes:
    """The Redis key of a block."""
    return b"kv:%d:%s" % (FORMAT, block_hash.hex().encode())


class BlockStore:
    """The blocks that one Redis holds. Safe to call from several tasks."""

    def __init__(self, url: str, config: Config) -> None:
        self._answer_s = config.answer_s
        self._pool = BlockingConnectionPool.from_url(
            url,
            max_connections=config.connections,
            timeout=config.connect_s,  # waiting for a free connection
            socket_timeout=config.answer_s,
            socket_connect_timeout=config.connect_s,
            retry=Retry(NoBackoff(), 0),  # its default retries for seconds; a cache must not
            socket_read_size=1 << 20,  # twice the throughput of its default on 1 MB values
        )
        self._redis = Redis(connection_pool=self._pool)

    async def count_prefix(self, block_hashes: Sequence[BlockHash]) -> int:
        """How many of these blocks exist, from the first up to the first hole.

        Raises `Unavailable` when Redis cannot say within `answer_s`.
        """
        try:
            async with asyncio.timeout(self._answer_s):
                return await self._count_prefix(block_hashes)
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            raise Unavailable(f"redis: {type(error).__name__}: {error}") from error

    async def _count_prefix(self, block_hashes: Sequence[BlockHash]) -> int:
        found = 0
        for start in range(0, len(block_hashes), _ROUND):
            async with self._redis.pipeline(transaction=False) as pipeline:
                for block_hash in block_hashes[start : start + _ROUND]:
                    pipeline.exists(block_key(block_hash))
                answers: list[int] = await pipeline.execute()
            for answer in answers:
                if not answer:
                    return found
                found += 1
        return found

    async def close(self) -> None:
        await self._redis.aclose()
        await self._pool.disconnect()
