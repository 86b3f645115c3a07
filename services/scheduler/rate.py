"""Events per second, smoothed over about ten. Pure."""

WINDOW_S = 1.0  # counted for so long before the rate moves
SMOOTH_S = 10.0


class Rate:
    """`count` each event, `tick` regularly, read `per_s`."""

    def __init__(self, now: float) -> None:
        self.per_s = 0.0
        self._counted = 0
        self._since = now

    def count(self) -> None:
        self._counted += 1

    def tick(self, now: float) -> None:
        elapsed = now - self._since
        if elapsed >= WINDOW_S:
            weight = min(1.0, elapsed / SMOOTH_S)
            self.per_s += weight * (self._counted / elapsed - self.per_s)
            self._counted, self._since = 0, now
