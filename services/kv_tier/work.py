"""What a lookup and a write come to, once their slots are ours."""

from collections import Counter

from services.kv_tier.blocks import Name, Offered, Wanted
from services.kv_tier.store import BlockStore
from shared.kv import HASH_SIZE
from shared.messages import LookupBlocks, StoreBlocks
from shared.slots import BorrowedSlots

Counts = Counter[str]


def names_of(fingerprint: bytes, packed: bytes) -> list[Name]:
    """Bytes that are no whole hash are ignored."""
    whole = len(packed) - len(packed) % HASH_SIZE
    hashes = (packed[at : at + HASH_SIZE] for at in range(0, whole, HASH_SIZE))
    return [Name(fingerprint, block_hash) for block_hash in hashes]


async def look_up(
    store: BlockStore, message: LookupBlocks, memory: BorrowedSlots | None, deadline: float
) -> tuple[int, int, Counts]:
    """Blocks found and loaded from the first one on, up to the first doubt; and what to count."""
    names = names_of(message.fingerprint, message.block_hashes)
    found = await store.count_prefix(names, deadline)
    counts = Counter(hit_blocks=found, missed_blocks=len(names) - found)
    if memory is None or found < max(1, message.min_blocks):
        return found, 0, counts
    pairs = zip(names[:found], message.slots, strict=False)
    wanted = [Wanted(name, memory.payload(slot)) for name, slot in pairs]
    outcomes = await store.load(wanted, deadline)
    counts["read_bytes"] = outcomes.pop("bytes")
    for outcome, count in outcomes.items():
        kind = f"{outcome}_blocks" if outcome in _KNOWN_ENDS else f"rejected_{outcome}"
        counts[kind] += count
    for loaded, block in enumerate(wanted):
        if block.outcome != "loaded":
            return loaded, loaded, counts
    return found, len(wanted), counts


async def write(
    store: BlockStore, message: StoreBlocks, memory: BorrowedSlots | None, deadline: float
) -> tuple[int, Counts]:
    """How many of these blocks L2 has now; and what to count."""
    counts: Counts = Counter()
    present = 0
    if memory is not None:
        names = names_of(message.fingerprint, message.block_hashes)
        pairs = zip(names, message.slots, strict=False)
        offered = [Offered(name, memory.payload(slot), message.dtype) for name, slot in pairs]
        outcomes = await store.store(offered, deadline)
        counts["written_bytes"] = outcomes.pop("bytes")
        present = outcomes["written"] + outcomes["known"]
        counts.update({f"{outcome}_blocks": count for outcome, count in outcomes.items()})
    if message.used:
        present += await store.use(names_of(message.fingerprint, message.used), deadline)
    return present, counts


_KNOWN_ENDS = {"loaded", "gone", "unanswered"}
"""Of a read: as hoped; evicted since it was seen; not in time. Every other end is a fault of it."""
