"""The L2 of a cluster: N servers, each of which holds a share of the blocks. Any doubt is a miss.

A block belongs to the server that ranks it highest (rendezvous hashing), so that the others keep
theirs when one comes or goes. A server that is dead, slow or full is a smaller cache: its breaker
opens, its blocks are missing, nothing else changes.

Connections block, so each is used in a thread. A call ends at its deadline whatever the server
does, and nothing is cancelled: when it returns nobody touches a slot any more.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import xxhash

from services.kv_tier import blocks
from services.kv_tier.blocks import Name, Offered, Wanted
from services.kv_tier.config import Config
from services.kv_tier.resp import Address, Connection, Refused
from shared.breaker import Breaker
from shared.config import ConfigError
from shared.errors import Unavailable
from shared.kv import BlockHash
from shared.log import Throttle

T = TypeVar("T")
R = TypeVar("R")
Job = Callable[[Connection, float], T]

_FAIR = 0.25  # of `answer_s`: whoever had less does not prove that a server is slow


class Shard:
    """One server."""

    def __init__(self, url: str, config: Config) -> None:
        try:
            self._address = Address(url)
        except ValueError as error:
            raise ConfigError(f"redis_url: {error}") from error
        self.breaker = Breaker(config.breaker)
        self.failures = 0
        self._throttle = Throttle()
        self._config = config
        self._seed = xxhash.xxh3_64_intdigest(str(self._address).encode())
        self._idle: list[Connection] = []
        self._threads = ThreadPoolExecutor(config.connections, thread_name_prefix="redis")

    def rank(self, block_hash: BlockHash) -> int:
        return int(xxhash.xxh3_64_intdigest(block_hash, self._seed))

    async def run(self, job: Job[T], deadline: float) -> T | None:
        """What `job` returns; None = the server is not asked, or could not say in time."""
        permit = self.breaker.enter(time.monotonic())
        if permit is None:
            return None
        worked: bool | None = None
        try:
            loop = asyncio.get_running_loop()
            result = await loop.run_in_executor(self._threads, self._do, job, deadline)
        except (Unavailable, Refused) as error:
            self.failures += 1
            now = time.monotonic()
            self._throttle.warning("redis_failed", now, server=str(self._address), error=str(error))
            worked = False
            return None
        except _Unfair:
            return None
        else:
            worked = True
            return result
        finally:
            permit.end(worked, time.monotonic())

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)
        self._forget()

    def _do(self, job: Job[T], deadline: float) -> T:
        """In a thread."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise _Unfair
        connection = None
        try:
            try:
                connection = self._idle.pop()
            except IndexError:
                connect_s = min(left_s, self._config.connect_s)
                connection = Connection(self._address, connect_s)
            result = job(connection, deadline)
        except BaseException as error:
            if connection is not None:
                connection.close()
            self._forget()  # a server that was started again has closed them, too
            if isinstance(error, Unavailable) and left_s < _FAIR * self._config.answer_s:
                raise _Unfair from error
            raise
        self._idle.append(connection)
        return result

    def _forget(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


class BlockStore:
    """The blocks of all servers. Deadlines are of `time.monotonic`."""

    def __init__(self, urls: Sequence[str], config: Config) -> None:
        """Raises `ConfigError`."""
        self.shards = [Shard(url, config) for url in urls]
        self._config = config

    async def count_prefix(self, names: Sequence[Name], deadline: float) -> int:
        """How many of these are there, from the first up to the first hole."""

        async def ask(shard: Shard, mine: list[Name]) -> set[Name]:
            answers = await shard.run(lambda c, d: blocks.exist(c, mine, d), deadline)
            pairs = zip(mine, answers or [False] * len(mine), strict=True)
            return {name for name, is_there in pairs if is_there}

        parts = await self._each(names, lambda name: name.block_hash, ask)
        there = set().union(*parts)
        for count, name in enumerate(names):
            if name not in there:
                return count
        return len(names)

    async def load(self, wanted: Sequence[Wanted], deadline: float) -> Counter[str]:
        """Read these into their slots; blocks by outcome, and bytes."""

        async def ask(shard: Shard, mine: list[Wanted]) -> None:
            await shard.run(lambda c, d: blocks.read(c, mine, self._config, d), deadline)

        await self._each(wanted, lambda block: block.name.block_hash, ask)
        return blocks.tally(wanted)

    async def store(self, offered: Sequence[Offered], deadline: float) -> Counter[str]:
        """Write these from their slots where they are missing; the same."""

        async def ask(shard: Shard, mine: list[Offered]) -> None:
            await shard.run(lambda c, d: blocks.write(c, mine, self._config, d), deadline)

        await self._each(offered, lambda block: block.name.block_hash, ask)
        return blocks.tally(offered)

    async def use(self, names: Sequence[Name], deadline: float) -> int:
        """Running legs would need these again. How many are there."""

        async def ask(shard: Shard, mine: list[Name]) -> int:
            return await shard.run(lambda c, d: blocks.use(c, mine, self._config, d), deadline) or 0

        return sum(await self._each(names, lambda name: name.block_hash, ask))

    async def close(self) -> None:
        for shard in self.shards:
            await shard.close()

    async def _each(
        self,
        items: Iterable[T],
        hash_of: Callable[[T], BlockHash],
        ask: Callable[[Shard, list[T]], Awaitable[R]],
    ) -> list[R]:
        """Ask each server about the items that are its own, all at once."""
        if not self.shards:
            return []
        shares: dict[Shard, list[T]] = {}
        for item in items:
            block_hash = hash_of(item)
            owner = max(self.shards, key=lambda shard: shard.rank(block_hash))
            shares.setdefault(owner, []).append(item)
        return await asyncio.gather(*(ask(shard, mine) for shard, mine in shares.items()))


class _Unfair(Exception):
    """Too little time was left to say anything about the server."""
