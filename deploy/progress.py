"""What a person sees while the mesh comes up: one line per stage."""

import os
import sys
import time
from typing import Protocol

import msgspec
from msgspec import Struct


class Stage(Struct, frozen=True, tag=True):
    """A stage has begun; the one before it is done."""

    name: str
    detail: str


class Ready(Struct, frozen=True, tag=True):
    """The mesh answers."""

    base_url: str
    model: str


class Refused(Struct, frozen=True, tag=True):
    """The mesh cannot come up; `reason` is one sentence."""

    reason: str


Event = Stage | Ready | Refused


class Progress(Protocol):
    """Who is told how the mesh comes up."""

    def tell(self, event: Event) -> None:
        """Show or pass on `event`."""


class Terminal:
    """Writes `stage  detail  seconds` lines; the seconds come when the stage is done."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._open = False

    def tell(self, event: Event) -> None:
        """Show `event`; a `Refused` is left to the caller, who raises it."""
        if self._open:
            sys.stdout.write(f"  {time.monotonic() - self._began:.1f} s\n")
            self._open = False
        match event:
            case Stage():
                self._began = time.monotonic()
                self._open = True
                sys.stdout.write(f"{event.name:<10} {event.detail}")
            case Ready():
                sys.stdout.write(f"{'ready':<10} {event.base_url}/v1  model {event.model}\n")
            case Refused():
                pass
        sys.stdout.flush()


class Pipe:
    """Sends events as JSON lines to the `shoal up` that started a detached supervisor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def tell(self, event: Event) -> None:
        """Pass on `event`; nobody may be listening any more."""
        if self._fd < 0:
            return
        try:
            os.write(self._fd, msgspec.json.encode(event) + b"\n")
        except BrokenPipeError:
            self._fd = -1

    @staticmethod
    def read(line: bytes) -> Event:
        """An event that `tell` wrote."""
        event: Event = msgspec.json.decode(line, type=Event)
        return event
