"""L1: which block of KV memory is free, used or cached, and what the cached ones hold."""

from collections import deque
from collections.abc import Iterable, Sequence

from services.gpu_worker.eviction import Eviction
from shared.kv import BlockHash

CHANGES_MAX = 16384
"""Names that came or went since somebody took them; more are not kept, but all names can be had."""


class BlockPool:
    """Paged blocks with reference counts and a prefix cache.

    A block is *used* (ref_count > 0), *cached* (ref_count 0 and named: evictable, in the order of
    `eviction`) or *free*. A name is the chained hash of a full, computed block; a name belongs to
    one block.
    """

    def __init__(self, num_blocks: int, block_size: int, eviction: Eviction | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.changes: dict[BlockHash, bool] = {}  # names that came (True) or went
        self._ref_count = [0] * num_blocks
        self._name: list[BlockHash] = [b""] * num_blocks
        self._named: dict[BlockHash, int] = {}
        self._free = deque(range(num_blocks))
        self._cached = Eviction(num_blocks) if eviction is None else eviction

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: free, or cached and evictable."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def names(self) -> list[BlockHash]:
        """All that can be looked up."""
        return list(self._named)

    def take_changes(self) -> dict[BlockHash, bool]:
        """`changes` since the last time; over `CHANGES_MAX` of them: some are missing."""
        changes, self.changes = self.changes, {}
        return changes

    def lookup(self, names: Iterable[BlockHash]) -> list[int]:
        """The blocks of the longest prefix of `names` that is here, used or cached."""
        blocks = []
        for name in names:
            block = self._named.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_unused(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` would leave `num_available` when shared."""
        return sum(self._ref_count[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Take one reference on each of `blocks`, found by `lookup`."""
        for block in blocks:
            assert self._name[block], "only named blocks are shared"
            if self._ref_count[block] == 0:
                self._cached.remove(block)
            self._cached.hit(block)
            self._ref_count[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` nameless blocks with one reference each; evicts what goes first."""
        assert count <= self.num_available, "the caller checks num_available"
        return [self._allocate_one() for _ in range(count)]

    def name(self, block: int, name: BlockHash, owner: bytes = b"") -> None:
        """Make a full, computed block of the tenant with the salt `owner` findable. If another
        block has the name, it keeps it.
        """
        assert self._ref_count[block] > 0
        if not self._name[block] and name not in self._named:
            self._name[block] = name
            self._named[name] = block
            self._cached.open(block, owner)
            self._note(name, is_here=True)

    def forget(self, blocks: Iterable[int]) -> None:
        """Take the names of used blocks away: what they hold is not to be trusted."""
        for block in blocks:
            assert self._ref_count[block] > 0
            self._unname(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference on each block of a table; its end is evicted before its start."""
        for block in reversed(blocks):
            assert self._ref_count[block] > 0
            self._ref_count[block] -= 1
            if self._ref_count[block] == 0:
                if self._name[block]:
                    self._cached.add(block)
                else:
                    self._free.append(block)

    def pin(self, names: Sequence[BlockHash], until: float) -> None:
        """Evict what is here of this prefix after all others until then, as far as pins may go."""
        for block in reversed(self.lookup(names[: self._cached.pins_max])):
            self._cached.pin(block, until)

    def expire_pins(self, now: float) -> None:
        self._cached.expire_pins(now)

    def check_integrity(self) -> None:
        """Assert that every block is in exactly one state and every name leads to its block."""
        free, cached = set(self._free), set(self._cached)
        used = {block for block, count in enumerate(self._ref_count) if count > 0}
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free) + len(used) + len(cached) == self.num_blocks
        assert free | used | cached == set(range(self.num_blocks))
        assert all(count >= 0 for count in self._ref_count)
        assert all(self._name[block] for block in cached)
        assert not any(self._name[block] for block in free)
        names = {name: block for block, name in enumerate(self._name) if name}
        assert names == self._named
        self._cached.check_integrity()

    def _allocate_one(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block = self._cached.pop()
            self._unname(block)
        self._ref_count[block] = 1
        return block

    def _unname(self, block: int) -> None:
        if name := self._name[block]:
            del self._named[name]
            self._name[block] = b""
            self._cached.close(block)
            self._note(name, is_here=False)

    def _note(self, name: BlockHash, *, is_here: bool) -> None:
        if len(self.changes) <= CHANGES_MAX:
            self.changes[name] = is_here
