"""What can be done to the blocks in L2; and how streams come to need them: a worker dies, and none
of the others has anything of its streams.
"""

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Literal

from redis.asyncio import Redis

from tests.chaos.nemesis import Fault, Field, Kill, NotInjected, proven

BLOCKS = "kv:*"
AT_ONCE = 256  # keys in one round trip
Role = Literal["kv_tier", "gpu_worker"]
Names = list[bytes]


async def flip(redis: Redis, names: Names, rng: random.Random) -> str:
    """One bit of every block is another one."""
    for some in parts(names):
        sizes = redis.pipeline(transaction=False)
        for name in some:
            sizes.strlen(name)
        bits = [rng.randrange(8 * max(1, size)) for size in await sizes.execute()]
        flips = redis.pipeline(transaction=False)
        for name, bit in zip(some, bits, strict=True):
            flips.execute_command("BITFIELD", name, "INCRBY", "u1", bit, 1)  # wraps
        await flips.execute()
    return f"a bit of {len(names)} blocks flipped"


async def swap(redis: Redis, names: Names, rng: random.Random) -> str:
    """Two by two, blocks have each other's values."""
    rng.shuffle(names)
    for some in parts(names):
        swaps = redis.pipeline()
        for one, other in zip(some[::2], some[1::2], strict=False):
            swaps.rename(one, "chaos")
            swaps.rename(other, one)
            swaps.rename("chaos", other)
        await swaps.execute(raise_on_error=False)  # one may have expired meanwhile
    return f"{len(names)} blocks have the values of others"


async def evict_half(redis: Redis, names: Names, rng: random.Random) -> str:
    """Half of all blocks are gone; so most prefixes have holes."""
    gone = [await redis.unlink(*some) for some in parts(rng.sample(names, len(names) // 2))]
    return f"{sum(gone)} of {len(names)} blocks gone"


class Spoil:
    """Does something to all blocks in L2; what is stored from then on is sound."""

    def __init__(self, how: Callable[[Redis, Names, random.Random], Awaitable[str]]) -> None:
        self._how = how

    async def inject(self, field: Field) -> str:
        async with Redis.from_url(field.site.redis_url()) as redis:
            names = sorted([name async for name in redis.scan_iter(BLOCKS, count=AT_ONCE)])
            if len(names) < 2:
                raise NotInjected(f"Redis holds {len(names)} blocks")
            return await self._how(redis, names, field.rng)

    async def heal(self) -> None:
        """Blocks expire, and others come."""


class Needed:
    """`fault`, if any, and then a worker dies: its streams go on where nothing of them is in L1.
    One of the counters of `role` whose names begin with `counter` is to grow.
    """

    def __init__(self, fault: Fault | None, role: Role, counter: str) -> None:
        self._faults = [*([fault] if fault else []), Kill("gpu_worker")]
        self._role = role
        self._counter = counter

    async def inject(self, field: Field) -> str:
        before = await field.site.told(self._role)
        proof = "; ".join([await fault.inject(field) for fault in self._faults])

        async def grown() -> str:
            return self._grown(before, await field.site.told(self._role))

        return f"{proof}; {await proven(grown, f'{self._counter} of a {self._role} grows')}"

    async def heal(self) -> None:
        for fault in self._faults:
            await fault.heal()

    def _grown(self, before: dict[str, Counter[str]], now: dict[str, Counter[str]]) -> str:
        """What those that were there before, and are there still, have counted since."""
        more: Counter[str] = Counter()
        for instance in before.keys() & now.keys():
            more += now[instance] - before[instance]
        return ", ".join(
            f"{count} {name}" for name, count in more.items() if name.startswith(self._counter)
        )


def parts(names: Names) -> Iterator[Names]:
    for at in range(0, len(names), AT_ONCE):
        yield names[at : at + AT_ONCE]
