"""The worker's part of the protocol around one engine step: take, adopt, renew, cancel, end."""

from collections import Counter

from services.gpu_worker.admission import check, ids_of
from services.gpu_worker.batcher import Batcher
from services.gpu_worker.block_events import BlockEvents
from services.gpu_worker.block_pool import BlockPool
from services.gpu_worker.config import WorkerConfig
from services.gpu_worker.eviction import Eviction
from services.gpu_worker.execution import Announce, Execution, silent
from services.gpu_worker.faults import Fault, error_of
from services.gpu_worker.l2.second_level import SecondLevel
from services.gpu_worker.legs import Leg, LegTable
from services.gpu_worker.pace import Pace
from services.gpu_worker.reports import Address, Reports
from services.gpu_worker.runner import ModelRunner, ModelSpec, Outcome, Scheduled
from services.gpu_worker.sequence import Sequence
from shared.core import Outbox
from shared.errors import MeshError, Overloaded
from shared.kv import HASH_SIZE
from shared.liveness import LATE_S
from shared.messages import (
    AskBlocks,
    Beacon,
    Beat,
    BlocksFound,
    BlocksStored,
    Cancel,
    End,
    EndedLeg,
    Renew,
    RenewedLeg,
    RenewLeg,
    Run,
    ToWorker,
)


class EngineCore:
    """Legs, batcher and model of one worker; synchronous, time passed in.

    `EngineCore(instance, runner, WorkerConfig(), now)`. The owner calls `receive` per message,
    `tick` regularly, and `step` until it returns False. A step may also be taken in three parts
    (`plan`, `execute`, `finish`), each at its own time.
    """

    def __init__(
        self, instance: str, runner: ModelRunner, config: WorkerConfig, now: float
    ) -> None:
        spec = runner.spec
        self.instance = instance
        self.outbox = Outbox()
        self.counters: Counter[str] = Counter()
        self.term = 0  # highest scheduler term heard
        self.num_steps = 0
        held = spec.num_blocks * spec.block_size  # at once; one that drops blocks may be longer
        lossy = spec.kv_policy.lossy
        self.max_model_len = spec.max_model_len if lossy else min(spec.max_model_len, held)
        eviction = Eviction(
            spec.num_blocks,
            by_use=config.eviction == "lfu",
            tenant_share=config.tenant_share,
            pinned_share=config.pinned_share,
        )
        self.pool = BlockPool(spec.num_blocks, spec.block_size, eviction)
        self.batcher = Batcher(
            self.pool,
            Pace(config.slowdown_max),
            max_legs=config.max_legs,
            max_batched_tokens=config.max_batched_tokens,
            policy=spec.kv_policy,
        )
        self._runner = runner
        self._execution = Execution(runner, self.counters)
        self._config = config
        self._legs = LegTable(config)
        self._reports = Reports(instance, self.outbox)
        self._block_events = BlockEvents(instance, self.pool, self.outbox)
        self._l2 = SecondLevel(instance, runner, self.batcher, config, self.outbox, self.counters)
        self._unannounced: list[Leg] = []  # nobody knows yet how much of them is cached
        self._connected = True
        self._draining = False
        self._ticked_at = now
        self._stepped = False  # since the last tick

    # --- views ---

    @property
    def spec(self) -> ModelSpec:
        return self._runner.spec

    @property
    def free_blocks(self) -> int:
        return self.pool.num_available

    @property
    def load(self) -> int:
        return len(self.batcher.running)

    @property
    def waiting(self) -> int:
        return len(self.batcher.waiting)

    @property
    def prefill_tokens_waiting(self) -> int:
        return self.batcher.num_prefill_tokens

    def stats(self) -> dict[str, int]:
        """What was counted since the start."""
        return {
            **self.counters,
            "steps": self.num_steps,
            "preemptions": self.batcher.num_preemptions,
            **{f"{kind}_tokens": count for kind, count in self.batcher.tokens.items()},
        }

    def seconds(self) -> dict[str, float]:
        """Time spent in each phase of the model since the start."""
        return self._runner.seconds() | self._l2.seconds()

    def wake_at(self, now: float) -> float | None:
        """When `tick` has something to do though no message comes and no step is taken."""
        due = self._l2.wake_at(now), self._block_events.wake_at()
        return min((at for at in due if at is not None), default=None)

    # --- messages ---

    def receive(self, message: ToWorker, now: float) -> None:
        """Take one message."""
        match message:
            case Run():
                self._run(message, now)
            case Cancel():
                self._cancel(message, now)
            case Renew():
                answers = [self._renewed(question, now) for question in message.legs]
                self._reports.renewed(message.gateway, answers)
            case Beacon():
                self.term = max(self.term, message.term)
            case AskBlocks():
                self._block_events.answer(message.scheduler)
            case BlocksFound() | BlocksStored() | Beat():
                self._l2.receive(message, now)
        self._reports.flush(self.num_steps)

    def _run(self, run: Run, now: float) -> None:
        submit = run.submit
        key = (submit.request_id, submit.choice)
        address = Address(submit.gateway, key, submit.epoch)
        if run.term < self.term:
            self.counters["run_of_lower_term"] += 1
            return
        self.term = run.term
        if self._legs.is_stale(key, submit.epoch):
            self.counters["run_stale"] += 1
            return
        if self._draining:
            self._reports.route_lost(address, "drain")
            return
        try:
            self._place(run, now)
        except MeshError as error:
            self.counters["run_refused"] += 1
            self._legs.bury(key, submit.epoch, now)
            self._reports.failed(address, error, started=False)
            self._reports.ended(run.scheduler, EndedLeg(*key, submit.epoch, "failed", 0))

    def _place(self, run: Run, now: float) -> None:
        """Adopt the leg if its ids go on from here, else take it anew. Raises what it refuses."""
        submit = run.submit
        key = (submit.request_id, submit.choice)
        prompt_ids, output_ids = ids_of(submit)
        known = self._legs.get(key) or self._legs.finished(key, now)
        if known is not None and known.can_resume(prompt_ids, output_ids):
            self._adopt(known, run, len(output_ids), now)
            return
        if (superseded := self._legs.get(key)) is not None:
            self._end(superseded, "moved", now)
        check(submit, prompt_ids, output_ids, self.spec, self.max_model_len)
        if len(self.batcher.waiting) >= self._config.max_waiting:
            raise Overloaded("too many legs wait at this worker", retry_after_s=1.0)
        self._take(run, prompt_ids, output_ids, now)

    def _take(self, run: Run, prompt_ids: list[int], output_ids: list[int], now: float) -> None:
        submit = run.submit
        names = submit.block_hashes
        if len(names) != len(prompt_ids) // self.spec.block_size * HASH_SIZE:
            names = b""  # hashed for another block size; the batcher hashes again
        sequence = Sequence(
            prompt_ids=prompt_ids,
            sampling=submit.sampling,
            salt=submit.salt,
            private=self.spec.kv_policy.lossy,
            output_ids=output_ids,
            block_hashes=[names[i : i + HASH_SIZE] for i in range(0, len(names), HASH_SIZE)],
            # They ride with the first id: who has an id has them.
            scores=[] if submit.sampling.prompt_logprobs is not None and not output_ids else None,
        )
        leg = Leg(
            key=(submit.request_id, submit.choice),
            epoch=submit.epoch,
            gateway=submit.gateway,
            scheduler=run.scheduler,
            detokenizer=run.detokenizer,
            sequence=sequence,
            text=submit.text,
            renewed_at=now,
            first_index=len(output_ids),
            num_sent=len(output_ids),
            pin=submit.pin,
        )
        self._legs.add(leg)
        self.batcher.add(sequence, priority=submit.priority, alone=submit.alone)
        self.counters["legs_taken"] += 1
        self._unannounced.append(leg)
        if not self.batcher.asks_first:
            self._announce()

    def _announce(self) -> None:
        """Tell the gateways of new legs, but of those that wait for L2 when that has answered."""
        taken, self._unannounced = self._unannounced, []
        for leg in taken:
            if self._legs.get(leg.key) is not leg:
                continue
            if self._l2.is_loading(leg.sequence):
                self._unannounced.append(leg)
            else:
                self._reports.started(leg, self.batcher.num_reusable_tokens(leg.sequence))

    def _adopt(self, leg: Leg, run: Run, num_delivered: int, now: float) -> None:
        leg.epoch = run.submit.epoch
        leg.gateway = run.submit.gateway
        leg.scheduler = run.scheduler
        leg.detokenizer = run.detokenizer
        leg.renewed_at = now
        leg.send_again_from(num_delivered)
        self.counters["legs_adopted"] += 1
        self._reports.started(leg, leg.sequence.num_cached_tokens, adopted=True)
        self._reports.new_ids(leg, now)
        if leg.end:
            self._legs.finish(leg, now)
            self._report_end(leg, leg.end)

    def _cancel(self, cancel: Cancel, now: float) -> None:
        key = (cancel.request_id, cancel.choice)
        leg = self._legs.get(key)
        if leg is not None and leg.epoch <= cancel.epoch:
            self._end(leg, "cancelled", now)
        self._legs.bury(key, cancel.epoch, now)
        finished = self._legs.finished(key, now)
        if finished is not None and finished.epoch <= cancel.epoch:
            self._legs.forget_finished(key)

    def _renewed(self, question: RenewLeg, now: float) -> RenewedLeg:
        request_id, choice, epoch = question.request_id, question.choice, question.epoch
        leg = self._legs.get((request_id, choice))
        if leg is not None and leg.epoch == epoch:
            leg.renewed_at = now
            state = self.batcher.state(leg.sequence)
            return RenewedLeg(request_id, choice, epoch, state, leg.num_sent)
        leg = self._legs.finished((request_id, choice), now)
        if leg is not None and leg.epoch == epoch:
            return RenewedLeg(request_id, choice, epoch, "done", leg.num_sent)
        return RenewedLeg(request_id, choice, epoch, "unknown")

    # --- time ---

    def tick(self, now: float) -> None:
        """Reap legs whose gateway has not renewed them, unless this process was away."""
        stepped = self._stepped
        late = now - self._ticked_at > LATE_S and not stepped
        self._ticked_at, self._stepped = now, False
        if late:
            self.slept(now)
        if self._connected:
            for leg in self._legs.active():
                if now - leg.renewed_at > self._config.lease_s:
                    self._end(leg, "reaped", now)
        self._legs.expire(now)
        self.pool.expire_pins(now)
        self._l2.tick(now, stepped=stepped)
        if self._unannounced:
            self._announce()
        self._block_events.tell(now)
        self._reports.flush(self.num_steps)

    def slept(self, now: float) -> None:
        """Judge nobody by what was missed while the process or its connection was away."""
        for leg in self._legs.active():
            leg.renewed_at = now

    def connection_lost(self, now: float) -> None:
        self._connected = False
        self._l2.deaf()
        self.slept(now)

    def reconnected(self, now: float) -> None:
        self._connected = True
        self.slept(now)

    def refuse_new(self, now: float) -> None:
        """Begin to drain: running legs go on; new ones, and those that only wait, go elsewhere."""
        self._draining = True
        self._move([leg for leg in self._legs.active() if self.batcher.waits(leg.sequence)], now)

    def move_all(self, now: float) -> None:
        """End the drain: the sessions of all legs still here re-drive them elsewhere."""
        self._draining = True
        self._move(self._legs.active(), now)

    def _move(self, legs: list[Leg], now: float) -> None:
        for leg in legs:
            self._reports.route_lost(Address(leg.gateway, leg.key, leg.epoch), "drain")
            self._end(leg, "moved", now)
        self._reports.flush(self.num_steps)

    # --- steps ---

    def step(self, now: float) -> bool:
        """One engine step, if there is anything to compute."""
        batch = self.plan()
        if batch:
            self.finish(batch, self.execute(batch), now)
        return bool(batch)

    def plan(self) -> list[Scheduled]:
        """The rows of the next step; empty = idle."""
        return self.batcher.schedule()

    def execute(self, batch: list[Scheduled], announce: Announce = silent) -> list[Outcome]:
        """Compute `batch`; see `Execution.run`."""
        return self._execution.run(batch, announce)

    def took(self, batch: list[Scheduled], seconds: float) -> None:
        """`execute(batch)` lasted so long; later steps are paced by it."""
        decoding = sum(row.num_tokens == 1 for row in batch)
        prompt_ids = sum(row.num_tokens for row in batch) - decoding
        self.batcher.pace.took(decoding, prompt_ids, seconds)
        self._l2.took(seconds)

    def finish(self, batch: list[Scheduled], outcomes: list[Outcome], now: float) -> None:
        """Take the outcome of `plan`'s batch and report it."""
        self._stepped = True
        self.num_steps += 1
        self.batcher.commit(batch, outcomes)
        for row, outcome in zip(batch, outcomes, strict=True):
            if outcome.fault:
                self._fault(self._legs.of(row.sequence), outcome.fault, now)
            elif outcome.token_id is not None:
                self._l2.computed(row.sequence, now)
                self._advance(self._legs.of(row.sequence), outcome, now)
        self._reports.flush(self.num_steps)

    def _advance(self, leg: Leg, outcome: Outcome, now: float) -> None:
        """One more id: report it, and the end if it is the last."""
        if outcome.logprobs is not None:
            leg.logprobs.append(outcome.logprobs)
        self.counters["output_tokens"] += 1
        leg.end = self._end_at_last_id(leg.sequence)
        self._reports.new_ids(leg, now)
        if leg.end:
            self._end(leg, leg.end, now)

    def _end_at_last_id(self, sequence: Sequence) -> End:
        sampling, count = sequence.sampling, len(sequence.output_ids)
        last = sequence.output_ids[-1]
        ends = last in self.spec.end_ids and not sampling.ignore_eos
        if count > sampling.min_tokens and (ends or last in sampling.stop_token_ids):
            return "stop"
        if count >= sampling.max_tokens or sequence.num_tokens >= self.max_model_len:
            return "length"
        return ""

    def _fault(self, leg: Leg, fault: Fault, now: float) -> None:
        """It alone fails, and nobody reuses its blocks."""
        self.counters[f"fault_{fault}"] += 1
        address = Address(leg.gateway, leg.key, leg.epoch)
        self._reports.failed(address, error_of(fault), started=True)
        self._end(leg, "failed", now, forget_blocks=True)

    # --- ends ---

    def _end(self, leg: Leg, reason: str, now: float, *, forget_blocks: bool = False) -> None:
        self._l2.forget(leg.sequence)
        self.batcher.remove(leg.sequence, forget=forget_blocks)
        if leg.pin and not forget_blocks:
            prompt = len(leg.sequence.prompt_ids) // self.spec.block_size
            self.pool.pin(leg.sequence.block_hashes[:prompt], now + self._config.pin_s)
        self._legs.end(leg, now)
        self._report_end(leg, reason)

    def _report_end(self, leg: Leg, reason: str) -> None:
        self.counters[f"legs_{reason}"] += 1
        count = len(leg.sequence.output_ids)
        self._reports.ended(leg.scheduler, EndedLeg(*leg.key, leg.epoch, reason, count))
