"""The tokenizer process: chats and texts to ids."""

import asyncio
from pathlib import Path
from typing import ClassVar

from services.tokenizer.config import Config
from services.tokenizer.core import TokenizerCore
from shared.actor import Actor
from shared.bus import Bus
from shared.clock import Clock, monotonic
from shared.config import Launch, settings
from shared.messages import ToTokenizer
from shared.model_files import read_model
from shared.process import run_service


class TokenizerActor(Actor):
    """Nothing here but the core: a question in, its answer out."""

    role = "tokenizer"
    mailbox = ToTokenizer
    survives_errors: ClassVar[bool] = True  # a function has no state to spoil

    def __init__(self, launch: Launch, bus: Bus, clock: Clock = monotonic) -> None:
        config = settings(launch.settings, Config, self.role)
        self.tokenizer = TokenizerCore(launch.instance, read_model(Path(launch.model)), config)
        super().__init__(launch, bus, self.tokenizer, clock)

    async def drain(self) -> None:
        """Answer what was asked; gateways ask others by now."""
        await self.settled()
        while self.tokenizer.num_jobs:  # noqa: ASYNC110 ticks do the work
            await asyncio.sleep(self.tick_s)


def main(launch: Launch) -> None:
    run_service(launch, TokenizerActor)
