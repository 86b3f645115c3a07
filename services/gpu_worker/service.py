"""The worker's I/O process: speaks on the bus for an engine that may be busy, hung or dead."""

import asyncio
from typing import ClassVar

import msgspec

from services.gpu_worker.config import WorkerConfig
from services.gpu_worker.engine_process import EngineProcess
from services.gpu_worker.frames import Kind
from services.gpu_worker.status_page import EngineStatus
from shared.actor import SETTLED_S, Actor
from shared.bus import Bus
from shared.clock import Clock, monotonic
from shared.config import Launch, Status, settings
from shared.errors import InvalidRequest
from shared.liveness import LATE_S
from shared.log import log
from shared.messages import Beat, Died, ToWorker
from shared.process import run_service
from shared.subjects import DIED, beacon, beat

SECONDS_EVERY = 10  # beats: one with the engine's seconds and some of its counts,
COUNTS = ("queried_tokens", "l1_hit_tokens", "l2_hit_tokens", "preemptions")  # that gateways show


class GpuWorker(Actor):
    """Forwards payloads to the engine and from it undecoded; beats with the engine's numbers.

    The engine ended: `Died` at once, then this process ends too and the supervisor starts both
    afresh. The engine hangs (a phase outlasts its bound): it is killed, and the same follows.
    """

    role = "gpu_worker"
    mailbox = ToWorker
    beat_s: ClassVar[float] = 0.1

    def __init__(self, launch: Launch, bus: Bus, clock: Clock = monotonic) -> None:
        self.config = settings(launch.settings, WorkerConfig, "gpu_worker")
        super().__init__(launch, bus, core=None, clock=clock)
        self.drain_s = self.config.drain_s
        self.engine = EngineProcess(launch, self.config, self._publish_bytes)
        self._status = EngineStatus()
        self._engine_ready = asyncio.Event()
        self._drained = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._ticked_at = self._awake_since = self.clock()

    def subjects(self) -> list[str]:
        return [beacon(self.launch.pool), *([beat("kv_tier")] if self.config.l2 else [])]

    async def on_start(self) -> None:
        await self.engine.start()
        self._watcher = asyncio.create_task(self._watch())
        await self._engine_ready.wait()

    def on_payload(self, payload: bytes) -> None:
        """Hand over as it is: the engine decodes, with one typed decoder."""
        if self.engine.send(Kind.MESSAGE, payload):
            self.handled += 1
        else:
            self.drop("full")

    def on_disconnected(self, now: float) -> None:  # noqa: ARG002 the engine has its own clock
        self.engine.send(Kind.CONNECTION_LOST)

    def on_reconnected(self, now: float) -> None:  # noqa: ARG002 the engine has its own clock
        self.engine.send(Kind.RECONNECTED)

    def tick(self, now: float) -> None:
        """Look at the engine; but first: did this process sleep, so that it knows nothing?"""
        if now - self._ticked_at > LATE_S:
            self._awake_since = now
            self.engine.send(Kind.SLEPT)
        self._ticked_at = now
        self._status = status = self.engine.status()
        self.detail = status.detail
        if status.ready:
            self._engine_ready.set()
        if self.draining and not status.load + status.waiting:
            self._drained.set()
        bound_ms = status.phase_bound_ms
        if bound_ms and status.phase_age_ms(now, self._awake_since) > bound_ms:
            log.error("engine_hung", phase=status.phase, bound_ms=bound_ms, step=status.step)
            self.ready = False
            self.engine.kill()

    def beat(self) -> Beat:
        now, status, policy = self.clock(), self._status, self.config.policy()
        return msgspec.structs.replace(
            super().beat(),
            term=status.term,
            model=self.launch.model_name,
            load=status.load,
            waiting=status.waiting,
            step=status.step,
            phase=status.phase,
            phase_age_ms=status.phase_age_ms(now, self._awake_since),
            phase_bound_ms=status.phase_bound_ms,
            free_blocks=status.free_blocks,
            total_blocks=status.total_blocks,
            block_size=status.block_size,
            max_legs=self.config.max_legs,
            max_model_len=status.max_model_len,
            prefill_tokens_waiting=status.prefill_tokens_waiting,
            step_tokens=self.config.max_batched_tokens,
            engine_seconds={} if self._beats % SECONDS_EVERY else self._seconds(),
            engine_counts={} if self._beats % SECONDS_EVERY else self._told_counts(),
            kv_policy=str(policy),
            leg_blocks_max=policy.blocks_max if policy.lossy else 0,
        )

    def stats(self) -> dict[str, int]:
        engine = self._counts()
        engine |= {f"us_{phase}": int(1e6 * s) for phase, s in self._seconds().items()}
        return super().stats() | {f"engine_{name}": count for name, count in engine.items()}

    def _counts(self) -> dict[str, int]:
        return msgspec.json.decode(self._status.counters or b"{}", type=dict[str, int])

    def _told_counts(self) -> dict[str, int]:
        counts = self._counts()
        return {name: counts[name] for name in COUNTS if name in counts}

    def _seconds(self) -> dict[str, float]:
        return msgspec.json.decode(self._status.seconds or b"{}", type=dict[str, float])

    def status(self) -> Status:
        status = self._status
        extra: dict[str, int | str] = {
            "waiting": status.waiting,
            "step": status.step,
            "free_blocks": status.free_blocks,
            "total_blocks": status.total_blocks,
        }
        load = status.load + status.waiting
        return msgspec.structs.replace(super().status(), load=load, extra=extra)

    async def drain(self) -> None:
        """Send new legs elsewhere, also those on their way here; let the others finish."""
        self.engine.send(Kind.REFUSE_NEW)
        await asyncio.sleep(SETTLED_S)
        await self._drained.wait()

    async def last_words(self) -> None:
        """The sessions of legs that have not finished re-drive them elsewhere."""
        await self.engine.end()

    async def on_stop(self) -> None:
        self.engine.close()
        if self._watcher is not None:
            await self._watcher

    async def _watch(self) -> None:
        """End this process when the engine has ended."""
        error = await self.engine.wait()
        if self.draining:
            return
        reason = str(error)
        log.error("engine_died", reason=reason)
        self.ready = False
        self.publish(DIED, Died(instance=self.instance, reason=reason))
        self.fail(error)

    def _publish_bytes(self, subject: str, payload: bytes) -> None:
        try:
            self.bus.publish(subject, payload)
        except InvalidRequest as error:
            self.drop("unsendable")
            log.error("unsendable", subject=subject, size=len(payload), error=error.detail)


def main(launch: Launch) -> None:
    """Run one worker."""
    run_service(launch, GpuWorker)
