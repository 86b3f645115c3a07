"""Stored requests as the edges see them: submit, follow, look, cancel, delete.

Nothing here runs a request. A submission is two appends: the log's first event, then the job that
any gateway takes (`executor.py`). Every gateway can serve every request, from its log.
"""

import asyncio
import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import ClassVar, NamedTuple

from services.gateway.openai.errors import PayloadTooLarge
from services.gateway.stored.config import StoredConfig
from services.gateway.stored.events import (
    CancelRequested,
    Ended,
    Event,
    Submitted,
    decode_event,
    encode_event,
)
from services.gateway.stored.log import Log, read_log
from services.gateway.stored.streams import JOBS, LOGS, job_consumer, job_stream, log_stream
from services.gateway.stored.tail import Tail
from shared.bus import Bus
from shared.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    MeshError,
    NotFound,
    Unavailable,
)
from shared.jetstream import JetStream, WrongLastSequence
from shared.log import log as logger
from shared.subjects import job, stored

CHECK_S = 1.0  # how often a gateway looks at the streams
FULL_SHARE = 0.8  # no new requests beyond: the rest of the bytes is for those that run
CONFLICTS_MAX = 64  # appends in a row that somebody else was quicker with
GRACE_S = 10.0  # past its deadline, before a reader ends what nobody else has ended
CANCEL_WAIT_S = 3.0  # for whoever runs it to say that it has ended


class IdempotencyConflict(InvalidRequest):
    """The key was used for another request."""

    status: ClassVar[int] = 422
    openai_code: ClassVar[str] = "idempotency_key_reused"


class Logged(NamedTuple):
    """One event of a log and its sequence."""

    seq: int
    event: Event


def request_id_of(secret: bytes, tenant: str, key: str) -> str:
    """The request that `key` of `tenant` names; without the secret nobody can tell which."""
    text = f"{len(tenant)}:{tenant}:{key}".encode()
    return hashlib.blake2b(text, key=secret, digest_size=16).hexdigest()


class Store:
    """All stored requests of the mesh. Every method checks the tenant: a request of another is
    `NotFound`. All raise `Unavailable` while JetStream is away.
    """

    def __init__(self, bus: Bus, config: StoredConfig) -> None:
        self.counters: Counter[str] = Counter()
        self.jetstream = JetStream(bus, config.append_timeout_s)
        self.why_not = "the streams have not been looked at yet"  # "" = new requests are taken
        self._bus = bus
        self._config = config
        self._keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """See to it from now on that the streams are there, and know whether they have room."""
        self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def close(self) -> None:
        """Stop that."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    async def submit(self, request_id: str, submitted: Submitted, *, keyed: bool) -> Log:
        """Take a request, which has been checked; on return it will be run. `keyed`: the client may
        send it again under the same id (`request_id_of`), and is then given the log that is there.

        Raises `PayloadTooLarge`, `IdempotencyConflict`, `Unavailable`.
        """
        if self.why_not:
            raise Unavailable(f"Stored requests: {self.why_not}.", retry_after_s=5.0)
        if len(submitted.body) > self._config.body_bytes_max:
            raise PayloadTooLarge(
                f"The body of a stored request is over {self._config.body_bytes_max} bytes."
            )
        log = await self._begin(request_id, submitted)
        if log.ended is None:
            try:
                await self.enqueue(request_id)
            except Unavailable:
                if not keyed:  # nobody knows its name who could come back for it
                    await self.jetstream.purge(LOGS, stored(request_id))
                raise
        return log

    async def enqueue(self, request_id: str) -> None:
        """Give the request a job, unless it has one."""
        with contextlib.suppress(WrongLastSequence):
            await self.jetstream.append(job(request_id), b"", 0)

    async def follow(self, request_id: str, tenant: str) -> AsyncGenerator[Logged]:
        """Every event of the log, from its first on and each once it is stored; `Ended` is the
        last. Raises `NotFound`, also when it is deleted meanwhile. Leave it with `aclosing`.
        """
        log = Log()
        async with Tail(self._bus, self.jetstream, request_id, self._config.poll_s) as tail:
            while log.ended is None:
                try:
                    entries = await tail.next()
                except Unavailable:
                    if log.submitted is None or self._overdue(log):
                        raise
                    continue
                for entry in entries:
                    event = decode_event(entry.payload)
                    log.add(entry.seq, event)
                    _check_tenant(log, tenant, request_id)
                    yield Logged(entry.seq, event)
                if not entries and self._overdue(log):
                    await self._append(request_id, tenant, _end_overdue)

    async def look(self, request_id: str, tenant: str) -> Log:
        """The log as it is now; raises `NotFound`."""
        log = await self._read(request_id)
        _check_tenant(log, tenant, request_id)
        return log

    async def history(self, request_id: str, tenant: str) -> list[Event]:
        """Every event so far, `Submitted` first; raises `NotFound`."""
        entries = await self.jetstream.read(LOGS, stored(request_id))
        log = read_log((entry.seq, entry.payload) for entry in entries)
        _check_tenant(log, tenant, request_id)
        return [decode_event(entry.payload) for entry in entries]

    async def cancel(self, request_id: str, tenant: str) -> Log:
        """Have it end; one that has ended is left alone. The log as it is then: whoever runs it may
        need a little longer.
        """
        log = await self._append(request_id, tenant, _request_cancel)
        if not log.adopted:  # nobody runs it, so nobody else would end it soon
            log = await self._append(request_id, tenant, _end_unadopted)
        if log.ended is not None:
            return log
        try:
            async with asyncio.timeout(CANCEL_WAIT_S):
                async with aclosing(self.follow(request_id, tenant)) as events:
                    async for _ in events:
                        pass
        except TimeoutError:
            self.counters["stored_cancels_pending"] += 1
        return await self.look(request_id, tenant)

    async def delete(self, request_id: str, tenant: str) -> None:
        """Cancel it, then forget everything about it."""
        await self.cancel(request_id, tenant)
        await self.jetstream.purge(LOGS, stored(request_id))
        self.counters["stored_deleted"] += 1

    # --- inside ---

    async def _keep(self) -> None:
        there = False
        while True:
            try:
                if not there:
                    await self._ensure()
                there = True
                why_not = await self._full()
            except MeshError as error:
                # The first time it may be we who slept, and a submission will find out.
                why_not = self.why_not if there else error.detail
                there = False
            if why_not != self.why_not:
                logger.info("stored_requests", why_not=why_not)
            self.why_not = why_not
            await asyncio.sleep(CHECK_S)

    async def _ensure(self) -> None:
        await self.jetstream.ensure_stream(log_stream(self._config))
        await self.jetstream.ensure_stream(job_stream(self._config))
        await self.jetstream.ensure_consumer(JOBS, job_consumer(self._config))

    async def _full(self) -> str:
        usage = await self.jetstream.usage(LOGS)
        return "their store is full" if usage.bytes > FULL_SHARE * self._config.bytes_max else ""

    async def _read(self, request_id: str) -> Log:
        entries = await self.jetstream.read(LOGS, stored(request_id))
        return read_log((entry.seq, entry.payload) for entry in entries)

    async def _begin(self, request_id: str, submitted: Submitted) -> Log:
        """The log of the request; its first event is `submitted` unless it was there before."""
        for _ in range(CONFLICTS_MAX):
            log = Log()
            try:
                seq = await self.jetstream.append(stored(request_id), encode_event(submitted), 0)
            except WrongLastSequence:
                log = await self._read(request_id)
                if log.submitted is None:  # too old to be kept whole, or just deleted
                    await self.jetstream.purge(LOGS, stored(request_id))
                    continue
                _check_same(log.submitted, submitted)
                self.counters["stored_repeated"] += 1
            else:
                log.add(seq, submitted)
                self.counters["stored_submitted"] += 1
            return log
        raise Unavailable("The log changed whenever it was to be begun.", retry_after_s=1.0)

    async def _append(
        self, request_id: str, tenant: str, make: Callable[[Log], Event | None]
    ) -> Log:
        """Append what `make` says of the log as it is, if anything; the log with it."""
        for _ in range(CONFLICTS_MAX):
            log = await self.look(request_id, tenant)
            event = make(log)
            if event is None:
                return log
            try:
                seq = await self.jetstream.append(stored(request_id), encode_event(event), log.last)
            except WrongLastSequence:
                continue
            log.add(seq, event)
            return log
        raise Unavailable("The log changed whenever it was to be written.", retry_after_s=1.0)

    def _overdue(self, log: Log) -> bool:
        """Has everybody who could have ended it failed to?"""
        return time.time() > log.deadline + GRACE_S


def _request_cancel(log: Log) -> Event | None:
    return None if log.ended or log.cancel_requested else CancelRequested()


def _end_unadopted(log: Log) -> Ended | None:
    if log.ended or log.adopted:
        return None
    return log.end(Cancelled("the request was cancelled before it ran."))


def _end_overdue(log: Log) -> Ended | None:
    return None if log.ended else log.end(DeadlineExceeded("no gateway ended it in time."))


def _check_tenant(log: Log, tenant: str, request_id: str) -> None:
    if log.submitted is None or log.submitted.tenant != tenant:
        raise NotFound(f"There is no stored request '{request_id}'.")


def _check_same(there: Submitted, again: Submitted) -> None:
    if (there.endpoint, there.body) != (again.endpoint, again.body):
        raise IdempotencyConflict("The idempotency key was used for another request.")
