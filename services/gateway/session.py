"""One request: what has been delivered of each leg, and what may happen to it next. Pure.

Delivered ids are the one hard state on the live path. Everything downstream can be lost: the leg is
driven again from them under a fresh epoch, and whatever still comes from an older epoch is dropped.
"""

from dataclasses import dataclass, field
from typing import Literal

from services.gateway.events import Delta, Emit, Opening, Resume, SessionEnd, SessionSpec
from services.gateway.opening import num_prompts, sampling_of_choices
from shared.errors import MeshError
from shared.ids import count_ids, pack_ids, unpack_ids
from shared.messages import (
    Cancel,
    Failed,
    Generate,
    RenewedLeg,
    Submit,
    TextRecord,
    Tokenized,
    TokenizedPrompt,
)
from shared.sampling import SamplingParams

ATTEMPTS_MAX = 4  # re-drives in a row without a new id after a death, a hang, a retryable failure
DEATHS_BEFORE_ALONE = 2  # after so many the leg runs alone; one more death ends it
BACKOFF_S = 0.05  # wait before the second re-drive in a row without a new id; doubles
BACKOFF_MAX_S = 1.0
RESEND_S = 0.3  # wait for `Accepted`; doubles
RESEND_MAX_S = 1.0
UNANSWERED_MAX = 3  # renewals

State = Literal["pending", "submitted", "accepted", "running", "ended"]
"""pending: a Submit is due. submitted: no `Accepted` yet. accepted: queued or placed somewhere.
running: `Started` named the worker."""

Cause = Literal[
    "leader",  # a new leader takes what the old one had queued
    "resend",  # no `Accepted` in time
    "gap",
    "tail",
    "unknown",
    "unanswered",
    "moved",  # RouteLost by a drain, or by a detokenizer that lacks ids
    "refused",  # retryable Failed before `Started`
    "failed",  # retryable Failed after `Started`
    "fault",  # the same, and it was the model that failed on this very leg
    "worker_death",
    "detokenizer_death",
    "hang",
]
ROUTE_LOST: dict[str, Cause] = {
    "worker_lost": "worker_death",
    "worker_hung": "hang",
    "detokenizer_lost": "detokenizer_death",
}
"""Reasons of `RouteLost` that are a death or a hang; all others are `moved`."""
ATTEMPTS: frozenset[Cause] = frozenset(
    {"failed", "fault", "worker_death", "detokenizer_death", "hang"}
)
DEATHS: frozenset[Cause] = frozenset({"worker_death", "detokenizer_death"})
UNCOUNTED: frozenset[Cause] = frozenset({"leader", "resend"})

Verdict = Literal["deliver", "drop", "gap"]


def cause_of(failed: Failed) -> Cause:
    """What a retryable failure is to its leg."""
    internal = failed.code == "internal"
    if failed.started:
        return "fault" if internal else "failed"
    # A process fell over this very leg, and others must not for the rest of its time.
    return "failed" if internal else "refused"


@dataclass(slots=True, eq=False)
class Leg:
    """One choice. `output_ids` are those delivered; `epoch` is the last one submitted."""

    choice: int
    prompt: TokenizedPrompt
    sampling: SamplingParams
    state: State = "pending"
    epoch: int = 0
    output_ids: list[int] = field(default_factory=list)
    scheduler: str = ""  # whom the epoch was submitted to
    worker: str = ""  # who runs the epoch, as far as known
    detokenizer: str = ""
    last_worker: str = ""  # who ran an earlier epoch
    last_epoch: int = 0  # that earlier epoch
    failed_worker: str = ""  # who failed on the leg last
    due: float = 0.0  # of a pending Submit, or of the re-send of an unanswered one
    resend_s: float = RESEND_S
    fruitless: int = 0  # re-drives in a row without a new id
    attempts: int = 0
    deaths: int = 0
    asked: bool = False  # a renewal that counts is open
    unanswered: int = 0
    tail_at: float | None = None  # when an answer first claimed more than was delivered
    tail_delivered: int = 0

    @property
    def delivered(self) -> int:
        return len(self.output_ids)

    @property
    def holder(self) -> str:
        """Whom to ask about the epoch: its worker once known, its scheduler until then."""
        return self.worker or self.scheduler

    @property
    def holders(self) -> list[str]:
        """Whoever may have the epoch in hand, or its forerunner."""
        names = (self.scheduler, self.worker or self.last_worker)
        return [name for name in names if name]

    @property
    def poisonous(self) -> bool:
        """Who ran it died once too often, the last time when it ran alone."""
        return self.deaths > DEATHS_BEFORE_ALONE

    def ended_by_ids(self) -> str:
        """The finish reason that the delivered ids alone imply, "" for none."""
        if self.delivered >= self.sampling.max_tokens:
            return "length"
        long_enough = self.delivered > self.sampling.min_tokens
        if long_enough and self.output_ids[-1] in self.sampling.stop_token_ids:
            return "stop"
        return ""

    def plan(self, cause: Cause, now: float, jitter_s: float) -> bool:
        """Make a Submit due because of `cause`. False when the leg has used up its attempts."""
        if cause in ATTEMPTS:
            # A fault is most likely a function of the ids: it is tried twice more, not four times.
            self.attempts += 2 if cause == "fault" else 1
            self.deaths += cause in DEATHS
            if self.attempts > ATTEMPTS_MAX or self.poisonous:
                return False
        wait = 0.0
        if cause not in UNCOUNTED:
            if self.fruitless:
                wait = min(BACKOFF_S * 2 ** min(self.fruitless - 1, 5), BACKOFF_MAX_S)
            self.fruitless += 1
        if cause in ("failed", "fault"):  # not there again
            self.failed_worker = self.worker or self.failed_worker
            self.worker = self.last_worker = ""
        self.state = "pending"
        self.due = now + wait + jitter_s
        if cause != "resend":
            self.resend_s = RESEND_S
        return True

    def submitted(self, scheduler: str, now: float) -> None:
        """The Submit of a fresh epoch goes to `scheduler` now."""
        if self.worker:
            self.last_worker, self.last_epoch = self.worker, self.epoch
        self.epoch += 1
        self.state = "submitted"
        self.scheduler, self.worker, self.detokenizer = scheduler, "", ""
        self.due = now + self.resend_s
        self.resend_s = min(self.resend_s * 2, RESEND_MAX_S)
        self.forget_questions()

    def forget_questions(self) -> None:
        """Begin the renewal clocks anew."""
        self.asked, self.unanswered, self.tail_at = False, 0, None

    def accepted(self) -> None:
        if self.state == "submitted":
            self.state = "accepted"

    def placed(self, worker: str, detokenizer: str) -> None:
        """The epoch's worker is known: it is asked from now on."""
        if worker != self.worker:
            self.forget_questions()
        self.worker, self.detokenizer = worker, detokenizer

    def lost_with(self, instance: str, *, hung: bool) -> Cause | None:
        """Why the loss of `instance` is a loss for this epoch, if it is one."""
        if instance not in (self.worker, self.detokenizer):
            return None
        if hung:
            return "hang"
        return "worker_death" if instance == self.worker else "detokenizer_death"

    def take(self, record: TextRecord) -> Verdict:
        """What to do with a record. `deliver` adds its ids to those delivered."""
        if record.epoch != self.epoch or self.state == "ended":
            return "drop"
        end = record.index + count_ids(record.ids)
        if record.index > self.delivered:
            return "gap"
        if record.index < self.delivered:
            # Text cannot be cut at an id, so a record that is half known is asked for again.
            return "gap" if end > self.delivered else "drop"
        if end == record.index and not record.finish_reason:
            return "drop"
        self.accepted()
        if end > record.index:
            self.output_ids += unpack_ids(record.ids)
            self.fruitless = self.attempts = self.deaths = 0
            self.tail_at = None
        if record.finish_reason:
            self.state = "ended"
        return "deliver"

    def ask(self) -> bool:
        """A renewal that counts goes out. True when too many went unanswered."""
        if self.asked:
            self.unanswered += 1
        self.asked = True
        return self.unanswered >= UNANSWERED_MAX

    def answered(self, answer: RenewedLeg, now: float, apart_s: float) -> Cause | None:
        """Read a holder's answer; the reason to re-drive, if there is one.

        The tail is lost when two answers at least `apart_s` apart claim more than was delivered
        and no id came between.
        """
        self.asked, self.unanswered = False, 0
        if answer.state == "unknown":
            return "unknown"
        if answer.state == "placed":
            self.placed(answer.worker, answer.detokenizer)
        if answer.sent <= self.delivered and answer.state != "done":
            self.tail_at = None
        elif self.tail_at is None or self.tail_delivered != self.delivered:
            self.tail_at, self.tail_delivered = now, self.delivered
        elif now - self.tail_at >= apart_s:
            return "tail"
        return None


class Session:
    """A request from its opening to its one `SessionEnd`."""

    def __init__(
        self, spec: SessionSpec, emit: Emit, seed: int, now: float, resume: Resume | None = None
    ) -> None:
        self.spec = spec
        self.deadline = now + spec.timeout_s
        self.legs: list[Leg] = []
        self.cached_tokens = 0
        self.ended = False
        self._emit = emit
        self._resume = resume or Resume(epoch=0)
        self._opening = self._resume.opening
        self._told = self._opening.tokenized if self._opening is not None else None
        self._seed = spec.seed if spec.seed is not None else seed
        self._cached_seen: set[int] = set()

    @property
    def num_prompts(self) -> int:
        return num_prompts(self.spec)

    @property
    def opened(self) -> bool:
        """No tokenizer has to be asked: the session was opened before, here or elsewhere."""
        return self._opening is not None

    @property
    def prompts(self) -> list[TokenizedPrompt]:
        """The input as ids; none before a tokenizer has answered."""
        return self._told.prompts if self._told is not None else []

    @property
    def finished(self) -> bool:
        return bool(self.legs) and all(leg.state == "ended" for leg in self.legs)

    def generate(self, gateway: str, attempt: int, now: float) -> Generate:
        """The question for a tokenizer."""
        spec = self.spec
        return Generate(
            request_id=spec.request_id,
            attempt=attempt,
            gateway=gateway,
            chat=spec.chat,
            texts=spec.texts,
            ids=None if spec.ids is None else [pack_ids(ids) for ids in spec.ids],
            add_special_tokens=spec.add_special_tokens,
            salt=spec.salt,
            deadline_ms=self.remaining_ms(now),
            bad_words=spec.bad_words or None,
        )

    def tokenized(self, answer: Tokenized) -> None:
        """Take what a tokenizer made of the question."""
        self._told = answer

    def remaining_ms(self, now: float) -> int:
        return max(1, int((self.deadline - now) * 1000))

    def open_legs(self, max_model_len: int) -> None:
        """Fix what is not a function of ids, unless that was done before. Raises `MeshError`."""
        assert self._told is not None
        opening, resume = self._opening, self._resume
        if opening is None:
            opening = Opening(tokenized=self._told, seed=self._seed, max_model_len=max_model_len)
        told, limit = opening.tokenized, opening.max_model_len
        for choice, sampling in enumerate(
            sampling_of_choices(self.spec, told, limit, opening.seed)
        ):
            leg = Leg(choice, told.prompts[choice // self.spec.n], sampling, epoch=resume.epoch)
            leg.output_ids += resume.output_ids.get(choice, [])
            leg.state = "ended" if choice in resume.ended else "pending"
            self.legs.append(leg)
        if self._opening is None:
            self._opening = opening
            self._emit(opening)

    def submit(self, leg: Leg, gateway: str, now: float) -> Submit:
        """The message that drives `leg` from what was delivered, at its epoch."""
        spec = self.spec
        return Submit(
            request_id=spec.request_id,
            choice=leg.choice,
            epoch=leg.epoch,
            gateway=gateway,
            model=spec.model,
            tenant=spec.tenant,
            prompt_ids=leg.prompt.prompt_ids,
            sampling=leg.sampling,
            text=spec.text,
            output_ids=pack_ids(leg.output_ids),
            block_hashes=leg.prompt.block_hashes,
            salt=spec.salt,
            priority=spec.priority,
            last_worker=leg.last_worker,
            alone=leg.deaths >= DEATHS_BEFORE_ALONE,
            deadline_ms=self.remaining_ms(now),
            failed_worker=leg.failed_worker,
            pin=spec.pin,
        )

    def cancel(self, leg: Leg, epoch: int, reason: str) -> Cancel:
        """The message that ends all epochs of `leg` up to `epoch`."""
        return Cancel(
            request_id=self.spec.request_id, choice=leg.choice, epoch=epoch, reason=reason
        )

    def started(self, leg: Leg, num_cached_tokens: int) -> None:
        """Count the prefix found in a cache once per prompt, at its first start."""
        if leg.choice % self.spec.n == 0 and leg.choice not in self._cached_seen:
            self._cached_seen.add(leg.choice)
            self.cached_tokens += num_cached_tokens

    def deliver(self, leg: Leg, record: TextRecord) -> None:
        """Hand on what `leg` has just taken. Raises `MeshError` when a part of it is missing."""
        wanted = leg.sampling.prompt_logprobs is not None
        if wanted and record.index == 0 and record.prompt_logprobs is None:
            raise MeshError("the log probabilities of the prompt did not come with the first id.")
        self._emit(
            Delta(
                choice=record.choice,
                index=record.index,
                ids=leg.output_ids[record.index :],
                text=record.text,
                finish_reason=record.finish_reason,
                stop_reason=record.stop_reason,
                logprobs=record.logprobs,
                prompt_logprobs=record.prompt_logprobs,
            )
        )

    def finish_by_ids(self, leg: Leg) -> bool:
        """End `leg` here when its delivered ids already end it."""
        reason = leg.ended_by_ids()
        if reason:
            leg.state = "ended"
            self._emit(Delta(leg.choice, leg.delivered, [], "", reason))
        return bool(reason)

    def end(self, error: MeshError | None) -> None:
        assert not self.ended
        self.ended = True
        self._emit(
            SessionEnd(
                error=error,
                prompt_tokens=sum(count_ids(prompt.prompt_ids) for prompt in self.prompts),
                completion_tokens=sum(leg.delivered for leg in self.legs),
                cached_tokens=self.cached_tokens,
            )
        )
