"""The scheduler process: a core, and the subjects it listens on."""

from typing import ClassVar

from msgspec.structs import replace

from services.scheduler.config import SchedulerConfig
from services.scheduler.scheduler import SchedulerCore
from shared import subjects
from shared.actor import Actor
from shared.bus import Bus
from shared.clock import Clock, monotonic
from shared.config import Launch, Status, settings
from shared.messages import Beat, ToScheduler
from shared.process import run_service


class Scheduler(Actor):
    """One scheduler of the pool, leading or standby."""

    role: ClassVar[str] = "scheduler"
    mailbox = ToScheduler

    def __init__(self, launch: Launch, bus: Bus, clock: Clock = monotonic) -> None:
        config = settings(launch.settings, SchedulerConfig, self.role)
        self.scheduler = SchedulerCore(launch.instance, launch.pool, config, clock())
        super().__init__(launch, bus, self.scheduler, clock)

    def subjects(self) -> list[str]:
        return [subjects.beat("*"), subjects.beacon(self.launch.pool), subjects.DIED]

    def beat(self) -> Beat:
        core = self.scheduler
        return replace(super().beat(), term=core.term, waiting=core.num_queued)

    def status(self) -> Status:
        core = self.scheduler
        extra: dict[str, int | str] = {
            "leading": int(core.is_leader),
            "term": core.term,
            "queued": core.num_queued,
            "workers": core.num_workers,
            "known_blocks": core.peers.known_blocks,
        }
        return replace(super().status(), load=core.num_queued, extra=extra)

    async def drain(self) -> None:
        """A leader goes at once: its standby need not wait to miss its beacons."""
        self.scheduler.resign(self.clock())
        self.flush()


def main(launch: Launch) -> None:
    run_service(launch, Scheduler)
