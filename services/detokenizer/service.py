"""The detokenizer process: ids of running legs to text."""

from pathlib import Path
from typing import ClassVar

import msgspec

from services.detokenizer.config import Config
from services.detokenizer.legs import DetokenizerLegs
from shared.actor import Actor
from shared.bus import Bus
from shared.clock import Clock, monotonic
from shared.config import Launch, settings
from shared.messages import Beat, ToDetokenizer
from shared.model_files import read_model
from shared.process import run_service


class Detokenizer(Actor):
    """Nothing here but the core: `StepDone` in, `TextDelta` out."""

    role = "detokenizer"
    mailbox = ToDetokenizer
    beat_s: ClassVar[float] = 0.1  # the scheduler judges it like a worker

    def __init__(self, launch: Launch, bus: Bus, clock: Clock = monotonic) -> None:
        config = settings(launch.settings, Config, self.role)
        vocabulary = read_model(Path(launch.model)).vocabulary
        self.legs = DetokenizerLegs(launch.instance, vocabulary, config)
        super().__init__(launch, bus, self.legs, clock)

    def beat(self) -> Beat:
        return msgspec.structs.replace(super().beat(), load=self.legs.num_legs)

    async def drain(self) -> None:
        """Hand over: each leg goes on in another detokenizer from its next id."""
        self.legs.hand_over()
        await self.settled()


def main(launch: Launch) -> None:
    run_service(launch, Detokenizer)
