"""The tokenizer process: chats and texts to ids."""

from pathlib import Path
from typing import ClassVar

from services.tokenizer.config import Config
from services.tokenizer.core import TokenizerCore
from shared.actor import Actor, run_service
from shared.bus import Bus
from shared.clock import Clock, monotonic
from shared.config import Launch, settings
from shared.messages import ToTokenizer
from shared.model_files import read_model


class TokenizerActor(Actor):
    """Nothing here but the core: a question in, its answer out."""

    role = "tokenizer"
    mailbox = ToTokenizer
    survives_errors: ClassVar[bool] = True  # a function has no state to spoil

    def __init__(self, launch: Launch, bus: Bus, clock: Clock = monotonic) -> None:
        config = settings(launch.settings, Config, self.role)
        core = TokenizerCore(launch.instance, read_model(Path(launch.model)), config)
        super().__init__(launch, bus, core, clock)


def main(launch: Launch) -> None:
    run_service(launch, TokenizerActor)
