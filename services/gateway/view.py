"""What a gateway knows of the mesh for `/ready` and `/metrics`, from beats and beacons. Pure."""

from shared.liveness import LastHeard
from shared.messages import Beacon, Beat, Died, ToGateway


class MeshView:
    """Last beat of each live worker, and the leader's queue."""

    def __init__(self) -> None:
        self.queued = 0
        self._heard = LastHeard()
        self._workers: dict[str, Beat] = {}
        self.engine_seconds: dict[str, dict[str, float]] = {}  # of each live worker, by phase
        self.engine_counts: dict[str, dict[str, int]] = {}
        self._beacon: tuple[int, str] = (0, "")

    def receive(self, message: ToGateway, now: float) -> None:
        match message:
            case Beat(role="gpu_worker"):
                self._heard.heard(message.instance, now)
                self._workers[message.instance] = message
                if message.engine_seconds:
                    self.engine_seconds[message.instance] = message.engine_seconds
                    self.engine_counts[message.instance] = message.engine_counts
            case Died():
                self._drop(message.instance)
            case Beacon() if (message.term, message.scheduler) >= self._beacon:
                self._beacon = (message.term, message.scheduler)
                self._heard.heard(message.scheduler, now)
                self.queued = message.queued

    def tick(self, now: float) -> None:
        for instance in self._heard.silent(now):
            self._drop(instance)

    def restart(self, now: float) -> None:
        """We slept or were cut off: nobody else's silence counts before `now`."""
        self._heard.restart(now)

    def _drop(self, instance: str) -> None:
        self._heard.forget(instance)
        self._workers.pop(instance, None)
        self.engine_seconds.pop(instance, None)
        self.engine_counts.pop(instance, None)
        if instance == self._beacon[1]:
            self.queued = 0  # went with it; the next leader's beacon says what came back

    @property
    def led(self) -> bool:
        """Whether the pool's leader shows itself."""
        return self._beacon[1] in self._heard

    @property
    def workers(self) -> int:
        return len(self._workers)

    @property
    def running(self) -> int:
        """Legs in a batch now."""
        return sum(beat.load for beat in self._workers.values())

    @property
    def waiting(self) -> int:
        """Legs that wait, at workers and in the leader's queue."""
        return self.queued + sum(beat.waiting for beat in self._workers.values())

    @property
    def blocks_total(self) -> int:
        return sum(beat.total_blocks for beat in self._workers.values())

    @property
    def blocks_free(self) -> int:
        """Free or evictable."""
        return sum(beat.free_blocks for beat in self._workers.values())
