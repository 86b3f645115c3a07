"""Who leads the pool. Pure.

Two leaders at once are safe, because an epoch is addressed to one scheduler instance; so election
need only converge: the highest (term, instance) wins.
"""

BEACON_S = 0.25
SILENCE_S = 1.0  # without a beacon; also what a scheduler waits at its start, leader or not
OUTRANKED_S = 0.5  # two beacons: a higher term echoed for so long has no leader that shows itself


class Leadership:
    """One scheduler's view. `highest` is the highest term heard from anybody."""

    def __init__(self, instance: str, now: float) -> None:
        self.leading = False
        self.term = 0  # of our own office
        self.highest = 0
        self.leader = ""  # who leads, as far as we know
        self._instance = instance
        self._best = (0, "")  # highest claim heard or made
        self._heard_at = now
        self._outranked_at: float | None = None
        self._beacon_at = now
        self._vacant = False  # the leader we knew has gone or resigned
        self._resigned = False

    def beacon(self, term: int, scheduler: str, now: float) -> bool:
        """Another one claims to lead. True when we step down for it."""
        self.highest = max(self.highest, term)
        if scheduler == self._instance or (term, scheduler) < self._best:
            return False
        self._best = (term, scheduler)
        self._heard_at = now
        self._vacant = False
        self.leader = scheduler
        stepped_down, self.leading = self.leading, False
        return stepped_down

    def echo(self, term: int) -> None:
        """A beat shows that `term` was in use."""
        self.highest = max(self.highest, term)

    def vacate(self, scheduler: str) -> None:
        """`scheduler` is dead or has resigned: if it led, its office need not be waited for.

        Several standbys may take it; the highest claim stays, as ever.
        """
        if scheduler == self.leader and not self.leading:
            self._vacant = True

    def resign(self) -> bool:
        """Never lead again. True when we led until now."""
        led, self.leading, self._resigned = self.leading, False, True
        return led

    def tick(self, now: float) -> bool:
        """True when we take office now, for the first time or in a new term."""
        if self._resigned:
            return False
        if not self.leading:
            if now - self._heard_at < SILENCE_S and not self._vacant:
                return False
        elif self.highest <= self.term:
            self._outranked_at = None
            return False
        else:
            # Workers drop our lower term, so lead above it; unless its leader shows itself.
            self._outranked_at = now if self._outranked_at is None else self._outranked_at
            if now - self._outranked_at < OUTRANKED_S:
                return False
        self.leading = True
        self.term = self.highest = self.highest + 1
        self.leader = self._instance
        self._best = (self.term, self._instance)
        self._outranked_at = None
        self._vacant = False
        self._beacon_at = now
        return True

    def beacon_due(self, now: float) -> bool:
        """Whether to show ourselves now; the next time is counted from here."""
        if not self.leading or now < self._beacon_at:
            return False
        self._beacon_at = now + BEACON_S
        return True

    def restart(self, now: float) -> None:
        """We slept or were cut off: the silence may have been our own, and an office that was
        vacant may be taken.
        """
        self._heard_at = now
        self._vacant = False
        self._outranked_at = None
