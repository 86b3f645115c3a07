"""A circuit breaker: stop asking what keeps failing, and ask again with one probe. Pure.

Closed: everything passes. Open: nothing does, for `open_s`. Half-open: one probe at a time, which
closes it or opens it again. Only failures of the thing guarded count; whoever asks ends its permit
with True (worked), False (failed) or None (proves nothing: cancelled, the client's fault).
"""

from collections import deque
from typing import Literal

from msgspec import Struct

from shared.config import AboveZero, Count

State = Literal["closed", "open", "half_open"]


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a breaker opens, and for how long."""

    failures: Count = 5  # so many within `window_s` open it
    window_s: AboveZero = 1.0
    open_s: AboveZero = 1.0  # then one probe
    probe_s: AboveZero = 5.0  # a probe that has not ended by then is given up


DEFAULTS = Limits()


class Permit:
    """Leave for one call. End it exactly as the call ended; only the first end counts."""

    __slots__ = ("_breaker", "_ended", "_era")

    def __init__(self, breaker: "Breaker", era: int) -> None:
        self._breaker = breaker
        self._era = era
        self._ended = False

    def end(self, worked: bool | None, now: float) -> None:
        if not self._ended:
            self._ended = True
            self._breaker._end(self._era, worked, now)


class Breaker:
    """`opened` and `refused` count."""

    def __init__(self, limits: Limits = DEFAULTS) -> None:
        self.opened = 0
        self.refused = 0
        self._limits = limits
        self._failed_at: deque[float] = deque(maxlen=limits.failures)
        self._open_until: float | None = None  # None = closed
        self._probe_until: float | None = None  # None = no probe under way
        self._era = 0  # permits of an earlier era have no say

    def state(self, now: float) -> State:
        if self._open_until is None:
            return "closed"
        return "open" if now < self._open_until else "half_open"

    def enter(self, now: float) -> Permit | None:
        """Leave for a call, or None: do without."""
        state = self.state(now)
        probing = self._probe_until is not None and now < self._probe_until
        if state == "open" or (state == "half_open" and probing):
            self.refused += 1
            return None
        if state == "half_open":
            self._probe_until = now + self._limits.probe_s
            self._era += 1  # of this probe alone
        return Permit(self, self._era)

    def _end(self, era: int, worked: bool | None, now: float) -> None:
        if era != self._era:
            return
        was_probe, self._probe_until = self._probe_until is not None, None
        if worked is False:
            self._failed_at.append(now)
            if was_probe or self._too_many(now):
                self._open(now)
        elif worked and was_probe:
            self._open_until = None
            self._failed_at.clear()
            self._era += 1

    def _too_many(self, now: float) -> bool:
        full = len(self._failed_at) == self._limits.failures
        return full and now - self._failed_at[0] <= self._limits.window_s

    def _open(self, now: float) -> None:
        self.opened += 1
        self._era += 1
        self._failed_at.clear()
        self._open_until = now + self._limits.open_s
