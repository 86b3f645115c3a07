"""What the L1 of a worker holds, as far as it has told. Pure.

Always a guess: what was lost on the way, or has been evicted since, costs a worse place. So what
comes after a gap is still taken; the gap is closed by asking.
"""

from array import array

from shared.kv import HASH_SIZE, SHORT_SIZE
from shared.messages import BlocksChanged

ASK_S = 1.0  # between two questions to a worker
OVER_S = 60.0  # a worker that there is no room for is not listened to for so long


class Prefixes:
    """The blocks of one worker instance, each by the first `SHORT_SIZE` bytes of its hash."""

    def __init__(self) -> None:
        self._shorts: set[int] = set()
        self._seq = 0
        self._complete = False  # nothing was missed since a whole answer
        self._ask_at = self._listen_at = float("-inf")

    def __len__(self) -> int:
        return len(self._shorts)

    def take(self, message: BlocksChanged, total_blocks: int, room: int, now: float) -> bool:
        """False: there is no `room` for so many, so the worker is not known, nor asked for a while.

        More than its `total_blocks` shows that word of some that went was lost: all is asked anew.
        What is older than the last message is dropped; what has the same `seq` is another part of
        it, or a duplicate that changes nothing.
        """
        if message.seq < self._seq or now < self._listen_at:
            return True
        if message.whole:
            self._shorts.clear()
            self._complete = True
        elif message.seq > self._seq + 1:
            self._complete = False
        self._seq = message.seq
        self._shorts.difference_update(_shorts(message.removed))
        self._shorts.update(_shorts(message.added))
        count = len(self._shorts)
        if count > min(total_blocks, room):
            self._shorts.clear()
            self._complete = False
        if count > room:
            self._ask_at = self._listen_at = now + OVER_S
        return count <= room

    def asks(self, now: float) -> bool:
        """Whether to ask the worker now; the next time is counted from here."""
        if self._complete or now < self._ask_at:
            return False
        self._ask_at = now + ASK_S
        return True

    def num_leading(self, block_hashes: bytes) -> int:
        """How many of these blocks, from the first, the worker holds."""
        if not self._shorts:
            return 0
        whole = block_hashes[: len(block_hashes) // HASH_SIZE * HASH_SIZE]
        shorts = _shorts(whole)[:: HASH_SIZE // SHORT_SIZE]
        for index, short in enumerate(shorts):
            if short not in self._shorts:
                return index
        return len(shorts)


def _shorts(packed: bytes) -> "array[int]":
    return array("Q", packed[: len(packed) // SHORT_SIZE * SHORT_SIZE])
