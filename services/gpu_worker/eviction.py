"""Which cached block goes first. Pure.

Least recently used; or least often used with dynamic aging (LFU-DA, Arlitt et al., 2000): a block's
rank is its uses plus the rank of what was last evicted, so that what was hot long ago goes, too.
Before either, those of tenants that hold more than their share; after all others, pinned ones.
"""

from collections import OrderedDict
from collections.abc import Iterator

USES_MAX = 15  # counted of a block, so that ranks are few: between the lowest and so many above it


class _Order:
    """Blocks by rank, and in a rank by how long they have been here."""

    def __init__(self) -> None:
        self._rank: dict[int, int] = {}
        self._lines: dict[int, OrderedDict[int, None]] = {}  # by rank; none is empty

    def __len__(self) -> int:
        return len(self._rank)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rank)

    def __contains__(self, block: int) -> bool:
        return block in self._rank

    def add(self, block: int, rank: int = 0) -> None:
        self._rank[block] = rank
        line = self._lines.get(rank)
        if line is None:
            line = self._lines[rank] = OrderedDict()
        line[block] = None

    def remove(self, block: int) -> int:
        """The rank that it had."""
        rank = self._rank.pop(block)
        line = self._lines[rank]
        del line[block]
        if not line:
            del self._lines[rank]
        return rank

    def first(self) -> int:
        return next(iter(self._lines[min(self._lines)]))


class Eviction:
    """The cached blocks of a pool of `num_blocks`, in the order in which they go.

    `tenant_share`: part of the pool beyond which a tenant's cached blocks go before all others; 1 =
    nobody's do. `pinned_share`: part of the pool that pins may hold; over it the oldest pin ends. A
    pin is a wish: a pinned block goes when no other cached one is left.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        by_use: bool = False,
        tenant_share: float = 1.0,
        pinned_share: float = 0.25,
    ) -> None:
        self.pins_max = int(pinned_share * num_blocks)
        self._by_use = by_use
        self._share = int(tenant_share * num_blocks) if tenant_share < 1 else None
        self._owner = [b""] * num_blocks
        self._uses = [0] * num_blocks
        self._all = _Order()  # but pinned ones
        self._of: dict[bytes, _Order] = {}  # the same by tenant, if there are shares
        self._over: set[bytes] = set()  # tenants with more than their share
        self._pins: OrderedDict[int, float] = OrderedDict()  # until when, oldest first
        self._pinned = _Order()
        self._age = 0

    def __len__(self) -> int:
        return len(self._all) + len(self._pinned)

    def __iter__(self) -> Iterator[int]:
        yield from self._all
        yield from self._pinned

    def open(self, block: int, owner: bytes) -> None:
        """A used block has got a name; it holds ids of the tenant `owner`."""
        self._owner[block], self._uses[block] = owner, 0

    def close(self, block: int) -> None:
        """A block that is not cached has lost its name."""
        self._pins.pop(block, None)

    def hit(self, block: int) -> None:
        """A block was found."""
        self._uses[block] += 1

    def add(self, block: int) -> None:
        """A block with a name is not used any more."""
        if block in self._pins:
            self._pinned.add(block)
            return
        rank = self._age + min(self._uses[block], USES_MAX) if self._by_use else 0
        self._all.add(block, rank)
        if self._share is not None:
            owner = self._owner[block]
            if owner not in self._of:
                self._of[owner] = _Order()
            self._of[owner].add(block, rank)
            self._weigh(owner)

    def remove(self, block: int) -> int:
        """A cached block is used again, or goes; the rank that it had."""
        if block in self._pinned:
            return self._pinned.remove(block)
        rank = self._all.remove(block)
        if self._share is not None:
            owner = self._owner[block]
            self._of[owner].remove(block)
            self._weigh(owner)
        return rank

    def pop(self) -> int:
        """Remove the cached block that goes first."""
        if self._over:
            order = self._of[max(self._over, key=lambda owner: len(self._of[owner]))]
        else:
            order = self._all or self._pinned
        block = order.first()
        rank = self.remove(block)
        if order is self._all:
            self._age = rank
        return block

    def pin(self, block: int, until: float) -> None:
        """Keep a named block until then; calls come in the order of `until`."""
        if not self.pins_max:
            return
        if block not in self._pins and block in self._all:
            self.remove(block)
            self._pinned.add(block)
        self._pins[block] = until
        self._pins.move_to_end(block)
        if len(self._pins) > self.pins_max:
            self._unpin(next(iter(self._pins)))

    def expire_pins(self, now: float) -> None:
        while self._pins and (oldest := next(iter(self._pins.items())))[1] <= now:
            self._unpin(oldest[0])

    def check_integrity(self) -> None:
        """Assert that a cached block is in one order, and at its tenant if there are shares."""
        assert len(set(self)) == len(self)
        assert set(self._pinned) == set(self._pins) & set(self)
        assert len(self._pins) <= self.pins_max
        if self._share is not None:
            assert sorted(b for order in self._of.values() for b in order) == sorted(self._all)
            assert all(self._owner[b] == owner for owner, order in self._of.items() for b in order)
            assert self._over == {o for o, order in self._of.items() if len(order) > self._share}

    def _unpin(self, block: int) -> None:
        del self._pins[block]
        if block in self._pinned:
            self._pinned.remove(block)
            self.add(block)

    def _weigh(self, owner: bytes) -> None:
        assert self._share is not None
        count = len(self._of[owner])
        if count > self._share:
            self._over.add(owner)
        else:
            self._over.discard(owner)
        if not count:
            del self._of[owner]
