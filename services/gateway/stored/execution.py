"""One stored request in the hands of one gateway: what to do next, from its log. Pure.

Only the log decides who runs a request. Every step that matters is an append that expects the
sequence read last, so whoever was paused, cut off or replaced learns it from being refused.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from services.gateway.events import Delta, SessionEnd
from services.gateway.feed import merge
from services.gateway.stored.config import StoredConfig
from services.gateway.stored.events import (
    Adopted,
    Event,
    Opened,
    Output,
    decode_event,
    encode_event,
    piece_of,
)
from services.gateway.stored.log import Log
from shared.errors import Cancelled, DeadlineExceeded, MeshError

FRUITLESS_MAX = 4  # adoptions in a row without output: the request, not its gateways, is at fault
EPOCH_SHIFT = 20  # submits of one adoption; the sequence of `Adopted` is above them
BURST = 4096  # events that are appended as soon as they can be
PACE_S = 0.25  # between two after that, so that time bounds the events of a log
RESERVE = 16  # events that are left for its end

Outcome = Literal["done", "fenced"]
"""done: nothing is left to do, for anybody. fenced: another gateway runs it."""


@dataclass(slots=True, frozen=True)
class Read:
    """Read the log behind `after`, then `read`."""

    after: int


@dataclass(slots=True, frozen=True)
class Append:
    """Append `payload` if `last` is the last sequence, then `appended`, `refused` or `unsure`."""

    payload: bytes
    last: int


@dataclass(slots=True, frozen=True)
class Begin:
    """Open a session where the log stands; its epochs begin above `epoch`."""

    epoch: int


@dataclass(slots=True, frozen=True)
class Drop:
    """Give up the session: what it delivers is not wanted any more."""


@dataclass(slots=True, frozen=True)
class Wait:
    """Nothing to do until something comes, or for `for_s`."""

    for_s: float


@dataclass(slots=True, frozen=True)
class Stop:
    """Leave it."""

    outcome: Outcome


Step = Read | Append | Begin | Drop | Wait | Stop


class Execution:
    """The owner does what `next` says, one step at a time, and tells what came of it. Between
    steps it passes on what the session says and what it hears of the log.
    """

    def __init__(self, gateway: str, config: StoredConfig, counters: Counter[str]) -> None:
        self.log = Log()
        self.counters = counters
        self._gateway = gateway
        self._config = config
        self._unread = True
        self._first = True  # nothing of the log is known
        self._outcome: Outcome | None = None
        self._mine = 0  # sequence of our `Adopted` while we hold the request
        self._session = False  # one is open
        self._dropping = False
        self._sent: tuple[Event, bytes] | None = None  # an append whose outcome is not known
        self._opened: Opened | None = None  # this and what follows: of the session, not sent yet
        self._deltas: list[Delta] = []
        self._ids = 0  # in them
        self._end: SessionEnd | None = None
        self._unlogged_since: float | None = None
        self._logged_at = 0.0

    # --- what the session says; it may not know yet that it is dropped ---

    def opened(self, opened: Opened) -> None:
        """It has fixed what is not a function of ids."""
        if self._session:
            self._opened = opened

    def delivered(self, delta: Delta, now: float) -> None:
        """It has new ids."""
        if not self._session:
            return
        self._deltas.append(delta)
        self._ids += len(delta.ids)
        if self._unlogged_since is None:
            self._unlogged_since = now
        self._check_buffer(now)

    def ended(self, end: SessionEnd) -> None:
        """It has ended."""
        if self._session:
            self._end = end

    # --- what came of a step ---

    def read(self, entries: Iterable[tuple[int, bytes]]) -> None:
        """What the log holds behind what is known: (sequence, event). Raises `MeshError` for what
        this version cannot read.
        """
        self._unread = False
        sent = self._sent
        for seq, payload in entries:
            self._sent = None  # it is among them, or is refused: the log has moved on
            own = sent is not None and payload == sent[1]
            self._add(seq, decode_event(payload), own=own)
        self._first = False

    def gone(self) -> None:
        """The log does not hold any more what was read of it: it was deleted."""
        self.log, self._first, self._unread, self._sent = Log(), True, True, None
        self._forget()

    def appended(self, seq: int, now: float) -> None:
        """It was stored."""
        assert self._sent is not None
        event, self._sent = self._sent[0], None
        self._add(seq, event, own=True)
        self._logged_at = now
        self._unlogged_since = now if self._deltas else None

    def refused(self) -> None:
        """Somebody else has appended before."""
        self.counters["stored_appends_refused"] += 1
        self._unread = True

    def unsure(self) -> None:
        """No answer. What was to be appended may be in the log, or come there yet."""
        self.counters["stored_appends_unsure"] += 1
        self._unread = True

    def heard(self, seq: int) -> None:
        """The log has an event `seq`; our own is heard before its append is answered."""
        if seq > self.log.last and self._sent is None:
            self._unread = True

    # --- what to do ---

    def next(self, now: float, wall: float) -> Step:
        """`now` is the clock of `delivered`, `wall` counts from 1970."""
        self._check_buffer(now)
        if not self._dropping and not self._unread:
            self._settle()
        if self._dropping:
            self._dropping = False
            return Drop()
        if self._outcome is not None:
            return Stop(self._outcome)
        if self._unread:
            return Read(self.log.last)
        if self._sent is None:
            event = self._due(now, wall)
            if event is not None:
                self._sent = (event, encode_event(event))
        if self._sent is not None:
            return Append(self._sent[1], self.log.last)
        if not self._session:
            self._session = True
            return Begin(self._mine << EPOCH_SHIFT)
        return Wait(PACE_S)

    def _settle(self) -> None:
        """Is there nothing left to do here?"""
        if self.log.submitted is None or self.log.ended is not None:
            self._outcome = "done"
        if self._outcome is not None:
            self._forget()

    def _due(self, now: float, wall: float) -> Event | None:
        """The event to append now, if there is one."""
        log = self.log
        if log.cancel_requested:
            return log.end(Cancelled("the request was cancelled: client."))
        if wall >= log.deadline:
            return log.end(DeadlineExceeded("no answer in the time of the request."))
        if log.events >= self._config.events_max - RESERVE:
            return log.end(MeshError(f"the answer has more than {log.events} events."))
        if not self._mine:
            if log.fruitless >= FRUITLESS_MAX:
                return log.end(MeshError(f"{log.fruitless} gateways in a row could not run it."))
            return Adopted(gateway=self._gateway)
        if self._opened is not None:
            opened, self._opened = self._opened, None
            return opened
        if self._deltas and (self._end is not None or self._paced(now)):
            deltas, self._deltas, self._ids = merge(list(self._deltas)), [], 0
            return Output(pieces=[piece_of(d) for d in deltas if isinstance(d, Delta)])
        if self._end is not None and not self._deltas:
            return log.end(self._end.error, self._end.cached_tokens)
        return None

    def _paced(self, now: float) -> bool:
        return self.log.events < BURST or now - self._logged_at >= PACE_S

    def _add(self, seq: int, event: Event, *, own: bool) -> None:
        self.log.add(seq, event)
        if own and not self._deltas:
            self._unlogged_since = None
        if not isinstance(event, Adopted):
            return
        if own:
            self._mine = seq
            self.counters["stored_adopted"] += 1
        elif not self._first:  # after our job came to us: there is a later one, and we are late
            self._outcome = "fenced"
            self.counters["stored_fenced"] += 1

    def _check_buffer(self, now: float) -> None:
        """Too much, or for too long, waits for a log that cannot be written: begin again from what
        is in it, once it can be.
        """
        waits_s = 0.0 if self._unlogged_since is None else now - self._unlogged_since
        if self._ids > self._config.buffer_ids_max or waits_s > self._config.buffer_s:
            self.counters["stored_buffers_dropped"] += 1
            self._forget()

    def _forget(self) -> None:
        """Let go of the request as far as it is not in the log."""
        self._dropping = self._dropping or self._session
        self._session, self._mine = False, 0
        self._opened, self._end, self._unlogged_since = None, None, None
        self._deltas, self._ids = [], 0
