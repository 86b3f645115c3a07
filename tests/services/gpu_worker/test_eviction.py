"""Which cached block goes first: by age or by use, a greedy tenant's before others', pins last."""

from typing import Any

import pytest

from services.gpu_worker.block_pool import BlockPool
from services.gpu_worker.eviction import USES_MAX, Eviction
from shared.ids import pack_ids
from shared.kv import block_hashes
from tests.services.gpu_worker.engine_kit import PROMPT, SIM, Worker


def pool_of(num_blocks: int, **policy: Any) -> BlockPool:
    return BlockPool(num_blocks, 16, Eviction(num_blocks, **policy))


def cache(pool: BlockPool, names: str, owner: bytes = b"") -> None:
    """One table with these names, cached."""
    table = pool.allocate(len(names))
    for block, name in zip(table, names, strict=True):
        pool.name(block, name.encode(), owner)
    pool.release(table)


def use(pool: BlockPool, names: str, times: int = 1) -> None:
    for _ in range(times):
        blocks = pool.lookup(name.encode() for name in names)
        pool.share(blocks)
        pool.release(blocks)


def evicted(pool: BlockPool, count: int) -> str:
    """The names that go when so many more blocks are wanted, in their order."""
    gone = ""
    for _ in range(count):
        before = pool.names
        pool.allocate(1)
        gone += "".join(name.decode() for name in before if name not in pool.names)
    pool.check_integrity()
    return gone


def test_by_use_what_came_again_outlives_what_did_not() -> None:
    """Uses count, and age among equals; by age the same uses end the other way round."""
    for by_use, order in ((True, "bca"), (False, "abc")):
        pool = pool_of(3, by_use=by_use)
        cache(pool, "a")
        use(pool, "a", times=2)
        cache(pool, "b")
        cache(pool, "c")
        assert evicted(pool, 3) == order


def test_by_use_what_was_hot_long_ago_goes_in_the_end() -> None:
    """Each eviction lifts what comes after it; no count of uses lasts for ever."""
    pool = pool_of(2, by_use=True)
    cache(pool, "h")
    use(pool, "h", times=1000)
    for number in range(2 * (USES_MAX + 1)):
        name = chr(ord("A") + number % 26)
        cache(pool, name)
        use(pool, name)
    assert pool.lookup([b"h"]) == []


def test_a_name_that_comes_back_begins_with_no_uses() -> None:
    """What a block was used for before does not help what it holds now."""
    pool = pool_of(2, by_use=True)
    cache(pool, "a")
    use(pool, "a", times=9)
    [block] = pool.lookup([b"a"])
    blocks = pool.allocate(2)
    pool.name(block, b"x")
    pool.name(sum(blocks) - block, b"y")
    pool.release(blocks)
    use(pool, "y")
    assert evicted(pool, 2) == "xy"


def test_a_tenant_over_its_share_loses_its_own_first() -> None:
    """Its oldest go until it is down to its share; from then on age decides."""
    pool = pool_of(8, tenant_share=0.25)
    cache(pool, "12", b"small")
    cache(pool, "a", b"greedy")
    cache(pool, "b", b"greedy")
    cache(pool, "cdef"[:4], b"greedy")
    assert evicted(pool, 4) == "abfe"
    assert evicted(pool, 4) == "21dc"


def test_without_shares_nobody_is_over() -> None:
    """A tenant that has the pool to itself may fill it."""
    pool = pool_of(4)
    cache(pool, "1", b"small")
    cache(pool, "abc", b"greedy")
    assert evicted(pool, 1) == "1"


def test_pinned_blocks_go_last_and_hold_up_nobody() -> None:
    """A pin is a wish: all blocks can be had, those of a pinned prefix after all others."""
    pool = pool_of(4, pinned_share=0.5)
    cache(pool, "ab")
    pool.pin([b"a", b"b"], until=10.0)
    cache(pool, "cd")
    assert pool.num_available == 4
    use(pool, "cd")
    assert evicted(pool, 4) == "dcba"


def test_a_pin_ends_with_its_time() -> None:
    """From then on a block is as old as its last use."""
    pool = pool_of(3, pinned_share=0.5)
    cache(pool, "a")
    pool.pin([b"a"], until=10.0)
    cache(pool, "b")
    pool.expire_pins(9.9)
    assert evicted(pool, 2) == "b"
    cache(pool, "c")
    pool.expire_pins(10.0)
    assert evicted(pool, 1) == "c"


def test_over_its_share_the_oldest_pin_ends() -> None:
    """A pin that is asked for again is young again."""
    pool = pool_of(4, pinned_share=0.5)
    for name in "abc":
        cache(pool, name)
        pool.pin([name.encode()], until=10.0)
        pool.pin([b"a"], until=11.0)
    cache(pool, "d")
    assert evicted(pool, 4) == "bdac"


def test_of_a_prefix_beyond_the_share_the_start_is_pinned() -> None:
    """The end alone would be of no use."""
    pool = pool_of(4, pinned_share=0.5)
    cache(pool, "abcd")
    pool.pin([b"a", b"b", b"c", b"d"], until=10.0)
    use(pool, "abcd")
    assert evicted(pool, 4) == "dcba"
    pool = pool_of(4, pinned_share=0.0)
    cache(pool, "a")
    pool.pin([b"a"], until=10.0)
    cache(pool, "b")
    assert evicted(pool, 3) == "a"


def test_a_block_that_is_not_trusted_loses_its_pin() -> None:
    """Forgotten is forgotten: what the block holds next is pinned by nobody."""
    pool = pool_of(2, pinned_share=1.0)
    cache(pool, "a")
    pool.pin([b"a"], until=10.0)
    blocks = pool.lookup([b"a"])
    pool.share(blocks)
    pool.forget(blocks)
    pool.release(blocks)
    cache(pool, "xy")
    use(pool, "x")
    assert evicted(pool, 1) == "y"


@pytest.mark.parametrize("pin", [False, True])
def test_a_prompt_that_asked_for_it_outlives_legs_that_fill_the_pool(*, pin: bool) -> None:
    """Its blocks are found again until the pin's time is over, on a worker that evicts by age."""
    worker = Worker(SIM, pin_s=1000.0)

    def reused(**fields: Any) -> int:
        """Ids of the prompt that were cached; then others fill the pool."""
        worker.run(choice=worker.core.num_steps, **fields)
        worker.steps()
        for _ in range(30):
            choice = worker.core.num_steps
            worker.run(choice=choice, salt=choice.to_bytes(8, "little"))
            worker.steps()
        return worker.take().started[0].num_cached_tokens

    assert reused(pin=pin) == 0
    assert reused() == (32 if pin else 0)
    worker.now += 1000.0
    worker.core.tick(worker.now)
    assert reused() == (32 if pin else 0)
    assert reused() == 0
    worker.assert_empty()


def test_a_worker_evicts_as_it_is_told() -> None:
    """Policy and share of its settings reach its pool: a tenant over its share loses its own."""
    worker = Worker(SIM, tenant_share=0.1)
    for choice, salt in enumerate([b"a" * 32, *(bytes([n]) * 32 for n in (7, 7, 7, 7, 7, 7))]):
        prompt = [choice + 1, *PROMPT] if choice else PROMPT
        worker.run(choice=choice, salt=salt, prompt_ids=pack_ids(prompt))
        worker.steps()
    worker.core.pool.allocate(SIM.num_blocks - 12)
    assert worker.core.pool.lookup(block_hashes(PROMPT, b"a" * 32))
