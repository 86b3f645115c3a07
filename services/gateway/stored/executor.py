"""Runs stored requests: takes their jobs, and does for each what its `Execution` says."""

import asyncio
import contextlib
import time
from collections import Counter
from typing import assert_never

from services.gateway.edge import Edge
from services.gateway.events import (
    Delta,
    Opening,
    Resume,
    SessionEnd,
    SessionEvent,
)
from services.gateway.meters import Measure
from services.gateway.stored.config import StoredConfig
from services.gateway.stored.events import Opened
from services.gateway.stored.execution import (
    Append,
    Begin,
    Drop,
    Execution,
    Outcome,
    Read,
    Stop,
    Wait,
)
from services.gateway.stored.streams import CONSUMER, JOBS, LOGS
from shared.bus import Bus, Delivery
from shared.errors import MeshError, Unavailable
from shared.jetstream import Job, WorkQueue, WrongLastSequence, heard
from shared.log import log as logger
from shared.subjects import logged, stored

BACKOFF_S = 0.05  # after an append or read without an answer; doubles
BACKOFF_MAX_S = 1.0


class Running:
    """One request that runs here."""

    def __init__(self, job: Job, execution: Execution, now: float) -> None:
        self.job = job
        self.execution = execution
        self.worked_at = now
        self.wake = asyncio.Event()
        self.session = 0  # number of the session whose events are wanted; 0 = none
        self.sessions = 0
        self.backoff_s = BACKOFF_S

    @property
    def request_id(self) -> str:
        return self.job.name


class Executor:
    """One gateway's share of the stored requests."""

    def __init__(self, edge: Edge, bus: Bus, instance: str) -> None:
        self.counters: Counter[str] = Counter()
        self._edge = edge
        self._bus = bus
        self._store = edge.parts.store
        self._instance = instance
        self._config: StoredConfig = edge.config.stored
        self._queue = WorkQueue(bus, JOBS, CONSUMER)
        self._running: dict[str, Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._room = asyncio.Event()
        self._room.set()
        self._taker: asyncio.Task[None] | None = None

    @property
    def running(self) -> int:
        """Requests that run here."""
        return len(self._running)

    def start(self) -> None:
        """Take jobs from now on."""
        self._taker = asyncio.get_running_loop().create_task(self._take())

    def tick(self, now: float) -> None:
        """Say of each job that it is being worked on: this loop turns."""
        for running in self._running.values():
            if now - running.worked_at >= self._config.working_s:
                running.worked_at = now
                running.job.working()

    async def stop_taking(self) -> None:
        """Take no more jobs; those that run go on."""
        if self._taker is not None:
            self._taker.cancel()
            await asyncio.gather(self._taker, return_exceptions=True)
            self._taker = None
            await self._queue.close()

    async def hand_over(self) -> None:
        """What still runs is given back: another gateway adopts it at once."""
        await self.stop_taking()
        jobs = [running.job for running in self._running.values()]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for job in jobs:
            job.again()
            self.counters["stored_handed_over"] += 1

    # --- inside ---

    async def _take(self) -> None:
        while True:
            await self._room.wait()
            job = await self._next()
            if job is None:
                continue
            if job.name in self._running:
                # Ours for too long without a sign: the later delivery is the one to settle.
                self._running[job.name].job = job
            else:
                self.counters["stored_jobs_taken"] += 1
                self._spawn(job)

    async def _next(self) -> Job | None:
        try:
            return await self._queue.next(self._config.pull_s)
        except MeshError as error:
            logger.warning("no_jobs", error=error.detail)
            await asyncio.sleep(BACKOFF_MAX_S)
            return None

    def _spawn(self, job: Job) -> None:
        execution = Execution(self._instance, self._config, self.counters)
        running = Running(job, execution, self._edge.parts.clock())
        self._running[job.name] = running
        if len(self._running) >= self._config.running_max:
            self._room.clear()
        task = asyncio.get_running_loop().create_task(self._run(running))
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            del self._running[job.name]
            self._room.set()

        task.add_done_callback(ended)

    async def _run(self, running: Running) -> None:
        """From its job to its end, here or elsewhere. A job that is not settled comes again."""

        def hear(delivery: Delivery) -> None:
            running.execution.heard(heard(delivery).seq)
            running.wake.set()

        subscription = None
        try:
            subscription = await self._bus.subscribe(logged(running.request_id), hear)
            if await self._drive(running) == "done":
                running.job.done()
                if running.execution.log.submitted is None:
                    await self._begun_again(running.request_id)
        except MeshError as error:
            logger.error("stored_failed", request_id=running.request_id, error=error.detail)
            self.counters["stored_failed"] += 1
        except Exception as error:  # noqa: BLE001 our bug: another gateway may do better
            logger.error("stored_failed", request_id=running.request_id, exc_info=error)
            self.counters["stored_failed"] += 1
        finally:
            self._drop(running)
            if subscription is not None:
                await subscription.unsubscribe()

    async def _drive(self, running: Running) -> Outcome:
        execution = running.execution
        while True:
            step = execution.next(self._edge.parts.clock(), time.time())
            match step:
                case Read():
                    await self._read(running, step.after)
                case Append():
                    await self._append(running, step)
                case Begin():
                    self._begin(running, step.epoch)
                case Drop():
                    self._drop(running)
                case Wait():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(step.for_s):
                            await running.wake.wait()
                    running.wake.clear()
                case Stop():
                    return step.outcome
                case _:
                    assert_never(step)

    async def _read(self, running: Running, after: int) -> None:
        """The event read last has to be there still, or it is not the log that was read."""
        execution, subject = running.execution, stored(running.request_id)
        try:
            entries = await self._store.jetstream.read(LOGS, subject, max(after - 1, 0))
        except Unavailable:
            await self._back_off(running)
            return
        if after and (not entries or entries[0].seq != after):
            execution.gone()
            return
        execution.read((entry.seq, entry.payload) for entry in entries if entry.seq > after)

    async def _append(self, running: Running, step: Append) -> None:
        execution, subject = running.execution, stored(running.request_id)
        try:
            seq = await self._store.jetstream.append(subject, step.payload, step.last)
        except WrongLastSequence:
            execution.refused()
        except Unavailable:
            execution.unsure()
            await self._back_off(running)
        else:
            running.backoff_s = BACKOFF_S
            execution.appended(seq, self._edge.parts.clock())

    async def _back_off(self, running: Running) -> None:
        await asyncio.sleep(running.backoff_s)
        running.backoff_s = min(running.backoff_s * 2, BACKOFF_MAX_S)

    async def _begun_again(self, request_id: str) -> None:
        """Its log was deleted while it ran. If it was begun anew at that moment, its new job was
        refused for the sake of the one that is done now.
        """
        with contextlib.suppress(Unavailable):
            if await self._store.jetstream.read(LOGS, stored(request_id)):
                await self._store.enqueue(request_id)

    # --- the session ---

    def _begin(self, running: Running, epoch: int) -> None:
        """Open a session where the log stands."""
        execution, parts = running.execution, self._edge.parts
        running.sessions += 1
        running.session = number = running.sessions
        measure = Measure(self._edge.meter, parts.clock)

        def emit(event: SessionEvent) -> None:
            if running.session != number:
                return
            measure.take(event)
            match event:
                case Opening():
                    execution.opened(_opened(event))
                case Delta():
                    execution.delivered(event, parts.clock())
                case SessionEnd():
                    running.session = 0
                    execution.ended(event)
            running.wake.set()

        try:
            asked = execution.log.submitted
            assert asked is not None
            spec = self._edge.stored(running.request_id, asked).spec
        except MeshError as error:
            emit(SessionEnd(error, 0, 0, 0))
            return
        parts.table.open(spec, emit, parts.clock(), _resume(execution, epoch))
        parts.flush()

    def _drop(self, running: Running) -> None:
        """Whatever the session still says is not wanted."""
        if running.session:
            running.session = 0
            self._edge.cancel(running.request_id, "moved")


def _opened(opening: Opening) -> Opened:
    return Opened(
        tokenized=opening.tokenized, seed=opening.seed, max_model_len=opening.max_model_len
    )


def _resume(execution: Execution, epoch: int) -> Resume:
    log, opening = execution.log, None
    if log.opened is not None:
        opening = Opening(
            tokenized=log.opened.tokenized,
            seed=log.opened.seed,
            max_model_len=log.opened.max_model_len,
        )
    return Resume(
        epoch=epoch,
        opening=opening,
        output_ids={choice: list(told.ids) for choice, told in log.choices.items()},
        ended=frozenset(choice for choice, told in log.choices.items() if told.finish_reason),
    )
