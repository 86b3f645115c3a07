"""What a worker remembers of its legs: those in hand, those just finished, those fenced off."""

from collections import OrderedDict
from dataclasses import dataclass, field

from services.gpu_worker.config import WorkerConfig
from services.gpu_worker.sequence import Sequence
from shared.ids import pack_ids
from shared.messages import End, PromptLogprobs, StepRecord, TextContext, TokenLogprobs
from shared.sampling import TextParams

LegKey = tuple[str, int]  # request_id, choice

_SILENCE_S = 2.0  # a detokenizer may have dropped a leg after this long: send the context again
_RECORD_IDS_MAX = 256  # with 20 logprobs of long tokens: 1 MB as text; the bus takes 8 MB
_PROMPT_TAIL = 8  # ids that a detokenizer needs to join text to the prompt's


@dataclass(slots=True, eq=False)
class Leg:
    """One leg in hand. `logprobs[i]` belongs to output index `first_index` + i."""

    key: LegKey
    epoch: int
    gateway: str
    scheduler: str
    detokenizer: str
    sequence: Sequence
    text: TextParams
    renewed_at: float
    first_index: int  # output ids before it came with the leg
    num_sent: int  # output index of the next id to send
    spoke_at: float = float("-inf")  # last record of this epoch
    pin: bool = False  # its prompt is to stay cached
    end: End = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def can_resume(self, prompt_ids: list[int], output_ids: list[int]) -> bool:
        """Whether this leg's ids start with those of a re-drive, so that it can take its epoch."""
        sequence, count = self.sequence, len(output_ids)
        return (
            sequence.prompt_ids == prompt_ids
            and sequence.output_ids[:count] == output_ids
            and count >= self.first_index
            and not (self.end and count == len(sequence.output_ids))
        )

    @property
    def has_news(self) -> bool:
        """Whether there are ids that were not sent."""
        return self.num_sent < len(self.sequence.output_ids)

    def send_again_from(self, index: int) -> None:
        """A new reader has the ids before `index` and no context."""
        self.num_sent = index
        self.spoke_at = float("-inf")

    def take_record(self, now: float) -> StepRecord:
        """The next ids that were not sent yet, with the text context where the reader may lack it.
        Call it while the leg `has_news`: what a re-drive asks for again may take several records.
        """
        sequence, index = self.sequence, self.num_sent
        upto = min(len(sequence.output_ids), index + _RECORD_IDS_MAX)
        logprobs = None
        if wants_logprobs := sequence.sampling.logprobs is not None:
            logprobs = self.logprobs[index - self.first_index : upto - self.first_index]
        context = None
        if now - self.spoke_at > _SILENCE_S:
            context = TextContext(
                prompt_tail=pack_ids(sequence.prompt_ids[-_PROMPT_TAIL:]),
                output_ids=pack_ids(sequence.output_ids[:index]),
                text=self.text,
                logprobs=wants_logprobs,
            )
        self.num_sent = upto
        self.spoke_at = now
        return StepRecord(
            request_id=self.key[0],
            choice=self.key[1],
            epoch=self.epoch,
            gateway=self.gateway,
            index=index,
            ids=pack_ids(sequence.output_ids[index:upto]),
            end="" if self.has_news else self.end,
            logprobs=logprobs,
            context=context,
            prompt_logprobs=None if index else self._prompt_logprobs(),
        )

    def _prompt_logprobs(self) -> PromptLogprobs | None:
        sequence = self.sequence
        if sequence.scores is None:
            return None
        assert len(sequence.scores) == len(sequence.prompt_ids) - 1, "an id came before the prompt"
        logprobs = [score.logprobs for score in sequence.scores]
        ranks = [score.rank for score in sequence.scores]
        return PromptLogprobs(pack_ids(sequence.prompt_ids), logprobs, ranks)


class LegTable:
    """Legs by key. An ended epoch leaves a tombstone, and a finished leg can be asked for a while.

    Both memories are bounded; the oldest entry goes first.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._active: dict[LegKey, Leg] = {}
        self._by_sequence: dict[Sequence, Leg] = {}
        self._finished: OrderedDict[LegKey, tuple[Leg, float]] = OrderedDict()
        self._tombstones: OrderedDict[LegKey, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._active)

    def active(self) -> list[Leg]:
        return list(self._active.values())

    def get(self, key: LegKey) -> Leg | None:
        return self._active.get(key)

    def of(self, sequence: Sequence) -> Leg:
        return self._by_sequence[sequence]

    def finished(self, key: LegKey, now: float) -> Leg | None:
        """The leg, if it finished here a short while ago."""
        leg, at = self._finished.get(key, (None, 0.0))
        return leg if now - at < self._config.finished_s else None

    def is_stale(self, key: LegKey, epoch: int) -> bool:
        """Whether `epoch` is in hand already, superseded or ended."""
        leg = self._active.get(key)
        ended, _ = self._tombstones.get(key, (-1, 0.0))
        return epoch <= max(ended, leg.epoch if leg else -1)

    def add(self, leg: Leg) -> None:
        assert leg.key not in self._active
        self._finished.pop(leg.key, None)
        self._active[leg.key] = leg
        self._by_sequence[leg.sequence] = leg

    def end(self, leg: Leg, now: float) -> None:
        """Take an active leg out; remembered as finished if it has come to its end."""
        del self._active[leg.key]
        del self._by_sequence[leg.sequence]
        self.bury(leg.key, leg.epoch, now)
        if leg.end:
            self.finish(leg, now)

    def finish(self, leg: Leg, now: float) -> None:
        """Remember (again) a leg that came to its end."""
        self._finished[leg.key] = (leg, now)
        self._finished.move_to_end(leg.key)
        self.bury(leg.key, leg.epoch, now)

    def forget_finished(self, key: LegKey) -> None:
        self._finished.pop(key, None)

    def bury(self, key: LegKey, epoch: int, now: float) -> None:
        """Remember that all epochs up to `epoch` are over."""
        ended, _ = self._tombstones.get(key, (-1, 0.0))
        self._tombstones[key] = (max(ended, epoch), now)
        self._tombstones.move_to_end(key)

    def expire(self, now: float) -> None:
        """Drop what is too old to be asked for."""
        config = self._config
        while self._finished:
            key, (_, at) = next(iter(self._finished.items()))
            if now - at < config.finished_s and len(self._finished) <= config.finished_max:
                break
            del self._finished[key]
        while self._tombstones:
            key, (_, at) = next(iter(self._tombstones.items()))
            if now - at < config.tombstone_s and len(self._tombstones) <= config.tombstones_max:
                break
            del self._tombstones[key]
