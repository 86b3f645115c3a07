"""An actor as a process: its bus, its signals, its exit status."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable

import uvloop

from shared.actor import Actor
from shared.bus import Bus
from shared.config import ConfigError, Launch
from shared.errors import Unavailable
from shared.log import configure, log
from shared.nats_bus import NatsBus


def run_service(launch: Launch, make: Callable[[Launch, Bus], Actor]) -> None:
    """The whole life of a service process; exits 0 after a drain and 1 after a failure. Raises
    `ConfigError` and whatever else `make` raises: starting it again would not help.

    SIGTERM or SIGINT begins the drain, a second one ends it.
    """
    configure(launch.role, launch.instance)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        failed = runner.run(_serve(launch, make))
    sys.exit(1 if failed else 0)


async def _serve(launch: Launch, make: Callable[[Launch, Bus], Actor]) -> bool:
    """True when the process failed."""
    if launch.status_fd is not None:
        os.set_blocking(launch.status_fd, False)
    try:
        bus = await NatsBus.connect(
            launch.nats_url, launch.nats_user, launch.nats_password, name=launch.instance
        )
    except Unavailable as error:
        log.error("no_bus", error=error.detail)
        return True
    actor = make(launch, bus)
    bus.on_disconnected = bus.on_reconnected = actor.look_at_connection
    bus.on_closed = lambda reason: actor.fail(Unavailable(f"the bus is closed for good: {reason}"))

    def end() -> None:
        actor.hurry() if actor.draining else actor.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    try:
        await actor.run()
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 the last frame: say why, then end
        log.critical("failed", exc_info=error)
        return True
    finally:
        bus.on_disconnected = bus.on_reconnected = lambda: None
        bus.on_closed = lambda _reason: None
        await bus.close()
    return False
