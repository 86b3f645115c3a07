"""Shared memory in which the engine says what it is in; read without asking it.

It stays readable while the engine is inside a kernel, hung or dead. The page is anonymous memory
(memfd) inherited as a descriptor: it goes with the last process that holds it.
"""

import mmap
import os
import struct
from typing import Any, NamedTuple

_PHASE_BYTES = 32
_DETAIL_BYTES = 512
_COUNTERS_BYTES = 2048
_SECONDS_BYTES = 512
_GENERATION = struct.Struct("Q")  # written in one piece
_BODY = struct.Struct(f"<{_PHASE_BYTES}s{_DETAIL_BYTES}s{_COUNTERS_BYTES}s{_SECONDS_BYTES}sd11q")
_BYTES = _GENERATION.size + 2 * _BODY.size
_READS_MAX = 1000


class EngineStatus(NamedTuple):
    """`phase_started` is `time.monotonic()`, which all processes of a Linux host share."""

    phase: str = "starting"
    detail: str = ""  # the stage of loading, or why the engine gave up
    counters: bytes = b""  # JSON; decoded when somebody asks
    seconds: bytes = b""  # by phase since the start, as JSON
    phase_started: float = 0.0
    phase_bound_ms: int = 0  # 0 = may last as long as it likes
    ready: int = 0
    step: int = 0
    load: int = 0
    waiting: int = 0
    prefill_tokens_waiting: int = 0
    term: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    block_size: int = 0
    max_model_len: int = 0

    def phase_age_ms(self, now: float, since: float = 0.0) -> int:
        """How long the phase has lasted, not counting time before `since`; 0 if unbounded."""
        if not self.phase_bound_ms:
            return 0
        return max(0, int(1000 * (now - max(self.phase_started, since))))


def create() -> int:
    """New memory for a page as a descriptor, to be inherited by the engine and closed by both."""
    fd = os.memfd_create("shoal-engine-status", os.MFD_CLOEXEC)
    os.ftruncate(fd, _BYTES)
    return fd


class StatusPage:
    """One writer, any number of readers. Two bodies in turn, and a generation that says which one
    is whole: the writer may be stopped at any place.
    """

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _BYTES)
        self._generation = 0
        self._status = EngineStatus()

    def update(self, **changes: Any) -> None:
        """Writer: change fields of `EngineStatus`."""
        self._status = status = self._status._replace(**changes)
        self._generation += 1
        phase, detail, *rest = status
        assert len(status.counters) <= _COUNTERS_BYTES
        assert len(status.seconds) <= _SECONDS_BYTES
        texts = (phase.encode()[:_PHASE_BYTES], detail.encode()[:_DETAIL_BYTES])
        _BODY.pack_into(self._memory, _body_at(self._generation), *texts, *rest)
        _GENERATION.pack_into(self._memory, 0, self._generation)

    def read(self) -> EngineStatus:
        """Reader: the last whole status."""
        for _ in range(_READS_MAX):
            (before,) = _GENERATION.unpack_from(self._memory)
            body = _BODY.unpack_from(self._memory, _body_at(before))
            (after,) = _GENERATION.unpack_from(self._memory)
            if before == after:
                if before:
                    phase, detail, counters, seconds, *numbers = body
                    texts = _text(phase), _text(detail)
                    jsons = counters.rstrip(b"\0"), seconds.rstrip(b"\0")
                    self._status = EngineStatus(*texts, *jsons, *numbers)
                break
        return self._status

    def close(self) -> None:
        self._memory.close()


def _body_at(generation: int) -> int:
    return _GENERATION.size + generation % 2 * _BODY.size


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")
