"""Every block is in one state, and a cached block holds what its name says."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from services.gpu_worker.block_pool import BlockPool
from services.gpu_worker.eviction import Eviction

NUM_BLOCKS = 8
NAMES = [bytes([n]) for n in range(1, 13)]
OWNERS = [b"a", b"b", b"c"]
SHARES = st.sampled_from([0.0, 0.25, 1.0])


class PoolMachine(RuleBasedStateMachine):
    """A pool beside a list of tables, what was written into each block, and who hears of names."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[int]] = []
        self.written: dict[int, bytes] = {}  # block -> the only name that its content deserves
        self.heard: set[bytes] = set()
        self.now = 0.0

    @initialize(by_use=st.booleans(), share=st.sampled_from([0.0, 0.3, 1.0]), pinned=SHARES)
    def begin(self, by_use: bool, share: float, pinned: float) -> None:
        eviction = Eviction(NUM_BLOCKS, by_use=by_use, tenant_share=share, pinned_share=pinned)
        self.pool = BlockPool(NUM_BLOCKS, 16, eviction)

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_available:
            table = self.pool.allocate(count)
            assert len(set(table)) == count
            assert not self.held() & set(table)
            for block in table:
                self.written.pop(block, None)
            self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), name=st.sampled_from(NAMES), owner=st.sampled_from(OWNERS))
    def fill_and_name(self, data: st.DataObject, name: bytes, owner: bytes) -> None:
        table = data.draw(st.sampled_from(self.tables))
        for block in table[-1:]:
            if block not in self.written:
                self.written[block] = name
                self.pool.name(block, name, owner)

    @rule(names=st.lists(st.sampled_from(NAMES), unique=True, max_size=4))
    def look_up_and_share(self, names: list[bytes]) -> None:
        blocks = self.pool.lookup(names)
        assert [self.written[block] for block in blocks] == names[: len(blocks)]
        before = self.pool.num_available
        leaving = self.pool.num_unused(blocks)
        self.pool.share(blocks)
        assert self.pool.num_available == before - leaving
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.pool.release(self.tables.pop(index))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pool.forget(table)
        assert not any(
            self.pool.lookup([self.written.get(block, b"")]) == [block] for block in table
        )

    @rule(names=st.lists(st.sampled_from(NAMES), unique=True, max_size=4))
    def pin(self, names: list[bytes]) -> None:
        self.pool.pin(names, self.now + 3)

    @rule()
    def pass_time(self) -> None:
        self.now += 1
        self.pool.expire_pins(self.now)

    @rule()
    def listen(self) -> None:
        for name, is_here in self.pool.take_changes().items():
            (self.heard.add if is_here else self.heard.discard)(name)
        assert self.heard == set(self.pool.names)

    @invariant()
    def is_whole(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_available == NUM_BLOCKS - len(self.held())

    def teardown(self) -> None:
        for table in self.tables:
            self.pool.release(table)
        self.pool.check_integrity()
        assert self.pool.num_available == NUM_BLOCKS
        assert len(set(self.pool.allocate(NUM_BLOCKS))) == NUM_BLOCKS
        assert not self.pool.names

    def held(self) -> set[int]:
        return {block for table in self.tables for block in table}


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def filled(pool: BlockPool, names: list[bytes]) -> list[int]:
    table = pool.allocate(len(names))
    for block, name in zip(table, names, strict=True):
        pool.name(block, name)
    return table


def test_eviction_takes_the_oldest_table_and_its_end_first() -> None:
    """A prefix outlives what follows it, and what was used lately outlives what was not."""
    pool = BlockPool(4, 16)
    old, new = filled(pool, [b"a", b"b"]), filled(pool, [b"c", b"d"])
    pool.release(old)
    pool.release(new)

    evicted = pool.allocate(1) + pool.allocate(1) + pool.allocate(1)

    assert evicted == [old[1], old[0], new[1]]
    assert pool.lookup([b"c", b"d"]) == [new[0]]


def test_a_hit_is_recent_use() -> None:
    """Sharing and releasing a cached block moves it to the end of the eviction order."""
    pool = BlockPool(2, 16)
    first, second = filled(pool, [b"a"]), filled(pool, [b"b"])
    pool.release(first)
    pool.release(second)
    pool.share(pool.lookup([b"a"]))
    pool.release(first)

    assert pool.allocate(1) == second


def test_free_blocks_go_before_cached_ones() -> None:
    """Nothing is evicted while a free block is left."""
    pool = BlockPool(2, 16)
    cached = filled(pool, [b"a"])
    pool.release(cached)

    assert pool.allocate(1) != cached
    assert pool.lookup([b"a"]) == cached


def test_the_first_holder_of_a_name_keeps_it() -> None:
    """Two blocks with the same content: one is found, the other is free once released."""
    pool = BlockPool(2, 16)
    first, second = filled(pool, [b"a"]), filled(pool, [b"a"])
    pool.release(second)
    pool.release(first)

    assert pool.lookup([b"a"]) == first
    assert pool.num_cached == 1
