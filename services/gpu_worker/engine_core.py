"""The worker's part of the protocol around one engine step: take, adopt, renew, cancel, end."""

from collections import Counter
from collections.abc import Callable

from services.gpu_worker.batcher import Batcher
from services.gpu_worker.block_pool import BlockPool
from services.gpu_worker.config import WorkerConfig
from services.gpu_worker.legs import Leg, LegTable
from services.gpu_worker.reports import Address, Reports
from services.gpu_worker.runner import ModelRunner, ModelSpec, Sampled, Scheduled
from services.gpu_worker.sequence import Sequence
from shared.core import Outbox
from shared.errors import ContextLengthExceeded, InvalidRequest, MeshError, Overloaded
from shared.ids import unpack_ids
from shared.kv import HASH_SIZE
from shared.liveness import LATE_S
from shared.log import log
from shared.messages import (
    Beacon,
    BlocksFound,
    Cancel,
    End,
    EndedLeg,
    Renew,
    RenewedLeg,
    RenewLeg,
    Run,
    Submit,
    ToWorker,
)

_SALT_MAX = 64  # bytes; blake2b takes no longer key
_BROKEN_STEPS_MAX = 3  # steps in a row in which every row raises: it is the model, not a request

Announce = Callable[[str, int], None]
"""Told the name of a phase and its bound in ms."""


class EngineBroken(Exception):
    """The model raises whatever it is given; only a new process can help."""


def _silent(phase: str, bound_ms: int) -> None:
    """Announce to nobody."""


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
        self.max_model_len = min(spec.max_model_len, spec.num_blocks * spec.block_size)
        self.pool = BlockPool(spec.num_blocks, spec.block_size)
        self.batcher = Batcher(
            self.pool, max_legs=config.max_legs, max_batched_tokens=config.max_batched_tokens
        )
        self._runner = runner
        self._config = config
        self._legs = LegTable(config)
        self._reports = Reports(instance, self.outbox)
        self._connected = True
        self._draining = False
        self._ticked_at = now
        self._stepped = False  # since the last tick
        self._broken_steps = 0

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
        }

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
            case BlocksFound():
                self.counters["blocks_found_unasked"] += 1  # the engine does not ask L2 yet
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
        prompt_ids, output_ids = _ids_of(submit)
        known = self._legs.get(key) or self._legs.finished(key, now)
        if known is not None and known.can_resume(prompt_ids, output_ids):
            self._adopt(known, run, len(output_ids), now)
            return
        if (superseded := self._legs.get(key)) is not None:
            self._end(superseded, "moved", now)
        self._check(submit, prompt_ids, output_ids)
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
            output_ids=output_ids,
            block_hashes=[names[i : i + HASH_SIZE] for i in range(0, len(names), HASH_SIZE)],
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
        )
        self._legs.add(leg)
        self.batcher.add(sequence, priority=submit.priority, alone=submit.alone)
        self.counters["legs_taken"] += 1
        self._reports.started(leg, self.batcher.num_reusable_tokens(sequence))

    def _adopt(self, leg: Leg, run: Run, num_delivered: int, now: float) -> None:
        leg.epoch = run.submit.epoch
        leg.gateway = run.submit.gateway
        leg.scheduler = run.scheduler
        leg.detokenizer = run.detokenizer
        leg.renewed_at = now
        leg.send_again_from(num_delivered)
        self.counters["legs_adopted"] += 1
        self._reports.started(leg, leg.sequence.num_cached_tokens, adopted=True)
        if leg.has_news:
            self._reports.new_ids(leg, now)
        if leg.end:
            self._legs.finish(leg, now)
            self._report_end(leg, leg.end)

    def _check(self, submit: Submit, prompt_ids: list[int], output_ids: list[int]) -> None:
        """Raise for what can never run here: a model must not meet an id that it does not have."""
        sampling, vocab_size = submit.sampling, self.spec.vocab_size
        if not prompt_ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if max(prompt_ids) >= vocab_size or max(output_ids, default=0) >= vocab_size:
            raise InvalidRequest(f"token ids must be below {vocab_size}", param="prompt")
        if not all(0 <= token_id < vocab_size for token_id in sampling.logit_bias):
            raise InvalidRequest(f"token ids must be below {vocab_size}", param="logit_bias")
        if len(submit.salt) > _SALT_MAX:
            raise InvalidRequest(f"the salt is longer than {_SALT_MAX} bytes", param="cache_salt")
        if sampling.max_tokens <= len(output_ids):
            raise InvalidRequest("max_tokens leaves no id to generate", param="max_tokens")
        if len(prompt_ids) + len(output_ids) >= self.max_model_len:
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt_ids)} ids; with the answer at most "
                f"{self.max_model_len} fit",
                param="prompt",
            )
        if len(self.batcher.waiting) >= self._config.max_waiting:
            raise Overloaded("too many legs wait at this worker", retry_after_s=1.0)

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
        late = now - self._ticked_at > LATE_S and not self._stepped
        self._ticked_at, self._stepped = now, False
        if late:
            self.slept(now)
        if self._connected:
            for leg in self._legs.active():
                if now - leg.renewed_at > self._config.lease_s:
                    self._end(leg, "reaped", now)
        self._legs.expire(now)
        self._reports.flush(self.num_steps)

    def slept(self, now: float) -> None:
        """Judge nobody by what was missed while the process or its connection was away."""
        for leg in self._legs.active():
            leg.renewed_at = now

    def connection_lost(self, now: float) -> None:
        self._connected = False
        self.slept(now)

    def reconnected(self, now: float) -> None:
        self._connected = True
        self.slept(now)

    def refuse_new(self) -> None:
        """Begin to drain: legs in hand go on, new ones are sent elsewhere."""
        self._draining = True

    def move_all(self, now: float) -> None:
        """End the drain: the sessions of all legs still here re-drive them elsewhere."""
        self._draining = True
        for leg in self._legs.active():
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

    def execute(self, batch: list[Scheduled], announce: Announce = _silent) -> list[Sampled | None]:
        """Compute `batch`, saying before each long phase what it is and how long it may last.

        If the model raises, each row is tried alone, and only those that raise again fail; a row
        can be repeated because the model changes no sequence. `EngineBroken` if that never helps.
        """
        bound_ms = self._runner.phase_bound_ms(batch)
        announce("prefill" if any(row.num_tokens > 1 for row in batch) else "decode", bound_ms)
        try:
            outcomes = self._runner.execute(batch)
        except Exception as error:  # noqa: BLE001 whatever a model raises is the fault of some row
            log.error("step_raised", rows=len(batch), exc_info=error)
            announce("isolate", bound_ms * (1 + len(batch)))
            return self._execute_apart(batch)
        self._broken_steps = 0
        return outcomes

    def _execute_apart(self, batch: list[Scheduled]) -> list[Sampled | None]:
        outcomes: list[Sampled | None] = []
        for row in batch:
            try:
                outcomes += self._runner.execute([row])
            except Exception as error:  # noqa: BLE001 see `execute`
                outcomes.append(Sampled(0, fault=type(error).__name__))
        all_failed = all(outcome is not None and outcome.fault for outcome in outcomes)
        self._broken_steps = self._broken_steps + 1 if all_failed else 0
        if self._broken_steps >= _BROKEN_STEPS_MAX:
            raise EngineBroken(f"every row raised in each of {self._broken_steps} steps")
        return outcomes

    def finish(self, batch: list[Scheduled], outcomes: list[Sampled | None], now: float) -> None:
        """Take the outcome of `plan`'s batch and report it."""
        self._stepped = True
        self.num_steps += 1
        self.batcher.commit(batch, outcomes)
        for row, outcome in zip(batch, outcomes, strict=True):
            if outcome is not None:
                leg = self._legs.of(row.sequence)
                if outcome.fault:
                    self._fault(leg, outcome.fault, now)
                else:
                    self._advance(leg, outcome, now)
        self._reports.flush(self.num_steps)

    def _advance(self, leg: Leg, outcome: Sampled, now: float) -> None:
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

    def _fault(self, leg: Leg, fault: str, now: float) -> None:
        """The numbers of one leg went wrong: it alone fails, and nobody reuses its blocks."""
        error = MeshError(f"the model failed on this request: {fault}")
        self._reports.failed(Address(leg.gateway, leg.key, leg.epoch), error, started=True)
        self._end(leg, "failed", now, forget_blocks=True)

    # --- ends ---

    def _end(self, leg: Leg, reason: str, now: float, *, forget_blocks: bool = False) -> None:
        self.batcher.remove(leg.sequence, forget=forget_blocks)
        self._legs.end(leg, now)
        self._report_end(leg, reason)

    def _report_end(self, leg: Leg, reason: str) -> None:
        self.counters[f"legs_{reason}"] += 1
        count = len(leg.sequence.output_ids)
        self._reports.ended(leg.scheduler, EndedLeg(*leg.key, leg.epoch, reason, count))


def _ids_of(submit: Submit) -> tuple[list[int], list[int]]:
    try:
        return unpack_ids(submit.prompt_ids), unpack_ids(submit.output_ids)
    except ValueError as error:
        raise InvalidRequest("ids are not packed u32", param="prompt") from error
