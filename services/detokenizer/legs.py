"""Which legs this detokenizer knows, and what each step of a worker adds to their text. Pure.

All state here is soft: whatever is missing is a `RouteLost`, after which the session re-drives and
the worker sends the text context again.
"""

from collections import Counter
from dataclasses import dataclass

from services.detokenizer.config import Config
from services.detokenizer.incremental import TextStream
from shared.core import Outbox
from shared.errors import InvalidRequest, MeshError, Overloaded
from shared.ids import pack_ids, unpack_ids
from shared.messages import (
    Cancel,
    Failed,
    PromptToken,
    RouteLost,
    StepDone,
    StepRecord,
    TextContext,
    TextDelta,
    TextRecord,
    ToDetokenizer,
    TokenLogprobs,
    TokenText,
    encode,
)
from shared.model_files import Vocabulary
from shared.subjects import inbox

Key = tuple[str, int]  # request_id, choice
DEFAULTS = Config()
WIRE_MAX = 7 << 20  # bytes of one message; the bus takes 8 MB


@dataclass(slots=True)
class LegText:
    """The text state of one leg; `stream.num_ids` is the output index it expects next."""

    epoch: int
    stream: TextStream
    heard_at: float


class Recent:
    """Epochs of legs, remembered for `keep_s` and at most `limit` of them, newest first to stay."""

    def __init__(self, limit: int, keep_s: float) -> None:
        self._limit, self._keep_s = limit, keep_s
        self._epochs: dict[Key, tuple[int, float]] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._epochs)

    def add(self, key: Key, epoch: int, now: float) -> None:
        """Remember the highest epoch given for `key`, from now."""
        known, _ = self._epochs.pop(key, (epoch, now))
        self._epochs[key] = (max(known, epoch), now)
        if len(self._epochs) > self._limit:
            del self._epochs[next(iter(self._epochs))]

    def covers(self, key: Key, epoch: int) -> bool:
        """Whether this epoch or a later one of the leg is remembered."""
        known = self._epochs.get(key)
        return known is not None and epoch <= known[0]

    def expire(self, now: float) -> None:
        for key, (_, added) in list(self._epochs.items()):
            if now - added < self._keep_s:
                break
            del self._epochs[key]


class DetokenizerLegs:
    """The detokenizer's core: `StepDone` in; one `TextDelta` per gateway and step out.

    Also out: `RouteLost` for what it cannot go on with, `Cancel` to the worker when a stop string
    ended a leg that the worker still runs. `counters` says how often what happened.
    """

    def __init__(self, instance: str, vocabulary: Vocabulary, config: Config = DEFAULTS) -> None:
        self.outbox = Outbox()
        self.counters: Counter[str] = Counter()
        self._instance = instance
        self._vocabulary = vocabulary
        self._config = config
        self._legs: dict[Key, LegText] = {}
        self._ended = Recent(config.max_tombstones, config.tombstone_s)
        self._reported = Recent(config.max_tombstones, config.complain_s)
        self._draining = False

    @property
    def num_legs(self) -> int:
        return len(self._legs)

    def receive(self, message: ToDetokenizer, now: float) -> None:
        if isinstance(message, StepDone):
            self._step(message, now)
        else:
            key = (message.request_id, message.choice)
            leg = self._legs.get(key)
            if leg is not None and leg.epoch <= message.epoch:
                del self._legs[key]
            self._ended.add(key, message.epoch, now)

    def hand_over(self) -> None:
        """Begin to drain: the session of each leg is told at its next record to go elsewhere."""
        self._draining = True

    def tick(self, now: float) -> None:
        """Drop legs whose lease ran out."""
        for key, leg in list(self._legs.items()):
            if now - leg.heard_at >= self._config.lease_s:
                del self._legs[key]
                self.counters["lapsed"] += 1
        self._ended.expire(now)
        self._reported.expire(now)

    def slept(self, now: float) -> None:
        """The own process or connection was away: what looked like silence proves nothing."""
        for leg in self._legs.values():
            leg.heard_at = now

    def _step(self, done: StepDone, now: float) -> None:
        deltas: dict[str, list[TextRecord]] = {}
        for record in done.records:
            leg = self._leg_of(record, now)
            if leg is None:
                continue
            leg.heard_at = now
            text = self._advance(leg, record, done.worker, now)
            if text is None:
                continue
            if text.prompt_logprobs is not None:
                self._send_alone(record, text, now)
            else:
                deltas.setdefault(record.gateway, []).append(text)
        for gateway, records in deltas.items():
            self.outbox.put(inbox(gateway), TextDelta(detokenizer=self._instance, records=records))

    def _send_alone(self, record: StepRecord, text: TextRecord, now: float) -> None:
        """Send what a whole prompt makes large: several together could be over the bus's limit.

        A session bounds their number; tokens of unusual length can still make them too large.
        """
        delta = TextDelta(detokenizer=self._instance, records=[text])
        if len(encode(delta)) <= WIRE_MAX:
            self.outbox.put(inbox(record.gateway), delta)
            return
        error = InvalidRequest(
            f"The log probabilities of the prompt take over {WIRE_MAX} bytes.",
            param="prompt_logprobs",
        )
        self._legs.pop((record.request_id, record.choice), None)
        self._refuse(record, error, now)

    def _leg_of(self, record: StepRecord, now: float) -> LegText | None:
        """The state that `record` goes on from, begun from its context if need be."""
        key = (record.request_id, record.choice)
        leg = self._legs.get(key)
        if self._ended.covers(key, record.epoch) or (leg and record.epoch < leg.epoch):
            self.counters["late"] += 1
            return None
        if self._draining:
            self._lose(record, "drain", now)
            return None
        if leg is None or record.epoch > leg.epoch:
            self._legs.pop(key, None)
            if record.context is None:
                self._lose(record, "unknown_leg", now)
                return None
            if len(self._legs) >= self._config.max_legs:
                detail = f"detokenizer {self._instance} holds {len(self._legs)} legs"
                self._refuse(record, Overloaded(detail), now)
                return None
            leg = self._legs[key] = LegText(record.epoch, self._begin(record.context), now)
        if record.index > leg.stream.num_ids and leg.stream.stop_string is None:
            self._lose(record, "gap", now)
            return None
        return leg

    def _begin(self, context: TextContext) -> TextStream:
        stream = TextStream(self._vocabulary, context.text, unpack_ids(context.prompt_tail))
        for token_id in unpack_ids(context.output_ids):
            if stream.stop_string is not None:
                break
            stream.push(token_id)  # what it releases was released before
        return stream

    def _advance(
        self, leg: LegText, record: StepRecord, worker: str, now: float
    ) -> TextRecord | None:
        """What `record` adds to the text; None if all of it is known."""
        stream = leg.stream
        known = stream.num_ids
        index = max(known, record.index)  # differ only if the replayed ids held a stop string
        ids = unpack_ids(record.ids)[index - record.index :]
        if not ids and not record.end and stream.stop_string is None:
            return None
        pieces: list[str] = []
        for position, token_id in enumerate(ids):
            if stream.stop_string is not None:
                break
            is_last = position == len(ids) - 1
            pieces.append(stream.push(token_id, record.end if is_last else ""))
        if not ids and stream.stop_string is None:
            pieces.append(stream.finish())
        taken = stream.num_ids - known
        finish_reason: str = record.end
        stop_reason: str | int | None = None
        if stream.stop_string is not None:
            finish_reason, stop_reason = "stop", stream.stop_string
            if not record.end or taken < len(ids):
                self._cancel(record, worker)
        elif record.end == "stop" and ids and ids[-1] not in self._vocabulary.end_ids:
            stop_reason = ids[-1]
        if finish_reason:
            key = (record.request_id, record.choice)
            del self._legs[key]
            self._ended.add(key, record.epoch, now)
        return TextRecord(
            request_id=record.request_id,
            choice=record.choice,
            epoch=record.epoch,
            index=index,
            ids=pack_ids(ids[:taken]),
            text="".join(pieces),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            logprobs=self._logprobs(record, index - record.index, ids[:taken]),
            prompt_logprobs=self._prompt_logprobs(record) if index == 0 else None,
        )

    def _logprobs(self, record: StepRecord, skip: int, ids: list[int]) -> list[TokenText] | None:
        """Log probabilities as a client is shown them, one per id."""
        if record.logprobs is None:
            return None
        entries = record.logprobs[skip : skip + len(ids)]
        return [self._token_text(i, entry) for i, entry in zip(ids, entries, strict=False)]

    def _prompt_logprobs(self, record: StepRecord) -> list[PromptToken] | None:
        """The prompt as a client is shown it; its first id has no log probability."""
        prompt = record.prompt_logprobs
        if prompt is None:
            return None
        first, *others = unpack_ids(prompt.ids)
        tokens = [PromptToken(first, self._vocabulary.text_of(first), self._vocabulary.raw(first))]
        for token_id, entry, rank in zip(others, prompt.logprobs, prompt.ranks, strict=True):
            shown = self._token_text(token_id, entry)
            ids = unpack_ids(entry.top_ids)
            top = [(i, *alternative) for i, alternative in zip(ids, shown.top, strict=False)]
            tokens.append(PromptToken(token_id, shown.token, shown.raw, shown.logprob, rank, top))
        return tokens

    def _token_text(self, token_id: int, entry: TokenLogprobs) -> TokenText:
        vocabulary = self._vocabulary
        return TokenText(
            logprob=entry.logprob,
            token=vocabulary.text_of(token_id),
            raw=vocabulary.raw(token_id),
            top=[
                (vocabulary.text_of(i), vocabulary.raw(i), logprob)
                for i, logprob in zip(unpack_ids(entry.top_ids), entry.top_logprobs, strict=False)
            ],
        )

    def _cancel(self, record: StepRecord, worker: str) -> None:
        cancel = Cancel(
            request_id=record.request_id,
            choice=record.choice,
            epoch=record.epoch,
            reason="stop_string",
        )
        self.outbox.put(inbox(worker), cancel)

    def _lose(self, record: StepRecord, reason: str, now: float) -> None:
        """Drop the leg's state and tell its session, though not at every step."""
        key = (record.request_id, record.choice)
        self._legs.pop(key, None)
        self.counters[reason] += 1
        if self._reported.covers(key, record.epoch):
            return
        self._reported.add(key, record.epoch, now)
        lost = RouteLost(
            request_id=record.request_id,
            choice=record.choice,
            epoch=record.epoch,
            reason=reason,
        )
        self.outbox.put(inbox(record.gateway), lost)

    def _refuse(self, record: StepRecord, error: MeshError, now: float) -> None:
        """Fail the leg; only what is not the client's fault may go better elsewhere."""
        self.counters[f"refused_{error.code}"] += 1
        self._ended.add((record.request_id, record.choice), record.epoch, now)
        failed = Failed(
            request_id=record.request_id,
            choice=record.choice,
            epoch=record.epoch,
            code=error.code,
            detail=error.detail,
            retryable=not isinstance(error, InvalidRequest),
            started=True,
            param=error.param,
        )
        self.outbox.put(inbox(record.gateway), failed)
