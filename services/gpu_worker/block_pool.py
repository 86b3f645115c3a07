"""L1: which block of KV memory is free, used or cached, and what the cached ones hold."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from shared.kv import BlockHash


class BlockPool:
    """Paged blocks with reference counts and a prefix cache.

    A block is *used* (ref_count > 0), *cached* (ref_count 0 and named: evictable, oldest first) or
    *free*. A name is the chained hash of a full, computed block; a name belongs to one block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_count = [0] * num_blocks
        self._name: list[BlockHash] = [b""] * num_blocks
        self._named: dict[BlockHash, int] = {}
        self._free = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: free, or cached and evictable."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

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
                del self._cached[block]
            self._ref_count[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` nameless blocks with one reference each; evicts the least recently used."""
        assert count <= self.num_available, "the caller checks num_available"
        return [self._allocate_one() for _ in range(count)]

    def name(self, block: int, name: BlockHash) -> None:
        """Make a full, computed block findable. If another block has the name, it keeps it."""
        assert self._ref_count[block] > 0
        if not self._name[block] and name not in self._named:
            self._name[block] = name
            self._named[name] = block

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
                    self._cached[block] = None
                else:
                    self._free.append(block)

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

    def _allocate_one(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._cached.popitem(last=False)
            self._unname(block)
        self._ref_count[block] = 1
        return block

    def _unname(self, block: int) -> None:
        if name := self._name[block]:
            del self._named[name]
            self._name[block] = b""
