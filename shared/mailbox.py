"""What an actor has been sent and not yet handled: two bounded lanes. Pure.

Control messages are small and rule over the rest (a `Cancel` must not wait behind the prefills
it would spare), so they have a lane of their own that is emptied first. Within a lane: FIFO.

A full lane drops its *oldest* message and counts it. That is safe for both lanes and better than
dropping the newest: whatever waited longest is the most likely to be out of date (superseded by
the next beat, re-asked by the next renewal, past its deadline), and every message of the mesh may
be lost without harm, because the session re-drives from what it has delivered.
"""

from collections import deque
from typing import Any, NamedTuple

from shared.messages import Beacon, Beat, Cancel, Died, Lost, Renew, Renewed

CONTROL = frozenset({Cancel, Renew, Renewed, Lost, Died, Beat, Beacon})
"""Types of the priority lane. `Failed` and `RouteLost` stay behind the text they follow."""


class Queued(NamedTuple):
    message: Any
    arrived: float


class Mailbox:
    """`limit` = messages per lane."""

    def __init__(self, limit: int) -> None:
        assert limit > 0
        self._limit = limit
        self._control: deque[Queued] = deque()
        self._data: deque[Queued] = deque()

    def __len__(self) -> int:
        return len(self._control) + len(self._data)

    def put(self, message: Any, now: float) -> Any | None:
        """Queue `message`; the message that had to go for it, if the lane was full."""
        lane = self._control if type(message) in CONTROL else self._data
        dropped = lane.popleft().message if len(lane) >= self._limit else None
        lane.append(Queued(message, now))
        return dropped

    def take(self, count: int) -> list[Queued]:
        """Up to `count` messages, control first."""
        taken: list[Queued] = []
        for lane in (self._control, self._data):
            while lane and len(taken) < count:
                taken.append(lane.popleft())
        return taken
