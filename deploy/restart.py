"""When a child is started again, and when its silence means that it hangs. Pure."""

import random
from collections import deque

from msgspec import Struct


class RestartPolicy(Struct, frozen=True, forbid_unknown_fields=True):
    """OTP's one-for-one: a child that keeps dying is given up, so that its reason can be read."""

    limit: int = 5  # restarts within `window_s`; the next death is the last
    window_s: float = 30.0
    base_s: float = 0.1  # first delay, doubled with each restart in the window
    cap_s: float = 5.0
    jitter: float = 0.2  # of the delay, so that children who fell together do not rise together


class Restarts:
    """The restarts of one child."""

    def __init__(self, policy: RestartPolicy, rng: random.Random) -> None:
        self.total = 0
        self._policy = policy
        self._rng = rng
        self._recent: deque[float] = deque()

    def next_delay(self, now: float) -> float | None:
        """The child died at `now`: seconds to wait before it is started again; None = never."""
        policy = self._policy
        while self._recent and now - self._recent[0] >= policy.window_s:
            self._recent.popleft()
        if len(self._recent) >= policy.limit:
            return None
        delay: float = min(policy.cap_s, policy.base_s * 2 ** len(self._recent))
        self._recent.append(now)
        self.total += 1
        return delay * (1 + self._rng.uniform(0, policy.jitter))

    def asked(self) -> float:
        """It ended because a person wanted it: that says nothing about the child."""
        self.total += 1
        return self._policy.base_s


class SilencePolicy(Struct, frozen=True, forbid_unknown_fields=True):
    """How long a child may say nothing on its status pipe, or a server answer no ping."""

    limit_s: float = 10.0  # children speak every 0.25 s, whatever they work on
    first_limit_s: float = 60.0  # until the first word: importing on a cold, busy machine


class Silence:
    """What the watcher knows about one child; a watcher that slept knows nothing."""

    def __init__(self, policy: SilencePolicy, now: float) -> None:
        self._policy = policy
        self._heard = False
        self._since = now

    def heard(self, now: float) -> None:
        """The child spoke."""
        self._heard = True
        self._since = now

    def slept(self, now: float) -> None:
        """The watcher itself was away until `now`."""
        self._since = now

    def too_long(self, now: float) -> float | None:
        """The limit that the child has broken, or None."""
        limit = self._policy.limit_s if self._heard else self._policy.first_limit_s
        return limit if now - self._since > limit else None
