"""Who is alive, judged by silence. Pure: time is passed in.

A watcher that slept knows nothing: a process whose own tick came late, or whose connection was
down, restarts its clocks before it judges others, because the silence may have been its own.
Nor does a deaf one: where nothing at all is heard, not even what the process itself says to
everybody, the bus is silent, whatever the connection looks like.
"""

TICK_S = 0.05  # how often an actor ticks its core
LATE_S = 0.25  # a tick later than this means the watcher slept; must stay well below SILENCE_S
SILENCE_S = 1.0  # a peer not heard for so long is dead; beats come every 0.1 or 0.25 s
DEAF_S = 0.5  # nothing heard from anybody for so long is a silence of the bus: two own beats


class Watcher:
    """Says whether its owner was awake, connected and hearing, so may judge others."""

    def __init__(self) -> None:
        self.connected = True
        self._ticked_at: float | None = None
        self._heard_at: float | None = None

    def heard(self, now: float) -> bool:
        """Call first for each message. True: restart every clock at `now`, because the bus was
        silent until then.
        """
        first = not self.hears(now)
        self._heard_at = now
        return first

    def hears(self, now: float) -> bool:
        """Whether anything came lately, from anybody. To judge others by it, an owner must listen
        to its own beats: else it takes the end of all others for a silence of the bus.
        """
        return self._heard_at is not None and now - self._heard_at < DEAF_S

    def slept(self, now: float) -> bool:
        """Call first in each tick. True: restart every clock at `now` before judging anybody."""
        last, self._ticked_at = self._ticked_at, now
        return last is not None and now - last > TICK_S + LATE_S


class LastHeard:
    """When each peer was last heard."""

    def __init__(self, silence_s: float = SILENCE_S) -> None:
        self._silence_s = silence_s
        self._heard_at: dict[str, float] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._heard_at

    def __len__(self) -> int:
        return len(self._heard_at)

    def heard(self, name: str, now: float) -> None:
        self._heard_at[name] = now

    def forget(self, name: str) -> None:
        self._heard_at.pop(name, None)

    def restart(self, now: float) -> None:
        """Count every silence from `now`."""
        self._heard_at = dict.fromkeys(self._heard_at, now)

    def silent(self, now: float) -> list[str]:
        """Peers not heard for the bound or longer; they stay until forgotten."""
        return [name for name, at in self._heard_at.items() if now - at >= self._silence_s]
