"""Writes that wait, oldest first. Under pressure the oldest is dropped: it expires first."""

from collections import deque

from shared.messages import StoreBlocks


class Backlog:
    """At most `limit` writes of `bytes_max` in slots."""

    def __init__(self, limit: int, bytes_max: int) -> None:
        self._limit = limit
        self._bytes_max = bytes_max
        self._waiting: deque[StoreBlocks] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, message: StoreBlocks) -> list[StoreBlocks]:
        """Add one; what had to go for it."""
        self._waiting.append(message)
        self._bytes += _slot_bytes(message)
        dropped = []
        while len(self._waiting) > self._limit or (
            self._bytes > self._bytes_max and len(self._waiting) > 1
        ):
            dropped.append(self.pop())
        return dropped

    def pop(self) -> StoreBlocks:
        """The oldest."""
        message = self._waiting.popleft()
        self._bytes -= _slot_bytes(message)
        return message


def _slot_bytes(message: StoreBlocks) -> int:
    return 0 if message.lent is None else len(message.slots) * message.lent.slot_bytes
