"""One JSON object per line on stderr, which the supervisor writes to the process's log file.

Never a prompt, an answer or a key: values that are not plain numbers, short strings or exceptions
do not belong in a log line.
"""

import contextlib
import logging
import os
import sys
from typing import Any, TextIO, cast

import structlog


class _Lossy:
    """A full disk costs lines, never the process that had something to say."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._file.flush()


def configure(role: str, instance: str) -> None:
    """Route structlog and the standard library (nats, redis, aiohttp) to JSON lines on stderr."""
    level = logging.getLevelNamesMapping().get(os.environ.get("SHOAL_LOG", "INFO"), logging.INFO)
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, _Lossy(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(role=role, instance=instance)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler], force=True)


log: structlog.typing.FilteringBoundLogger = structlog.get_logger()
"""The logger of every module: `log.info("what_happened", request_id=...)`."""


class Throttle:
    """At most one line per `every_s` of a kind, with how many were held back.

    A flood of the same complaint must not fill the disk or the loop.
    """

    def __init__(self, every_s: float = 1.0) -> None:
        self._every_s = every_s
        self._next: dict[str, float] = {}
        self._held: dict[str, int] = {}

    def warning(self, event: str, now: float, **fields: Any) -> None:
        if now < self._next.get(event, float("-inf")):
            self._held[event] = self._held.get(event, 0) + 1
            return
        self._next[event] = now + self._every_s
        log.warning(event, held_back=self._held.pop(event, 0), **fields)
