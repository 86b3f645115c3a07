"""A model without weights: real paging, real KV reads, deterministic words."""

import os
import re
import struct
import time
from collections.abc import Callable
from collections.abc import Sequence as Ids

from services.gpu_worker.config import SimConfig
from services.gpu_worker.runner import ModelSpec, Outcome, Scheduled
from services.gpu_worker.sequence import Score, Sequence
from shared.ids import pack_ids
from shared.kv import BLOCK_SIZE
from shared.messages import TokenLogprobs
from shared.model_files import Vocabulary

_WORD = re.compile(rb" [a-z]{2,}")
_MASK = (1 << 64) - 1
_UNWRITTEN = -1
_BLOCK = struct.Struct(f"<{BLOCK_SIZE}Q")
_FINGERPRINT = b"simulated-engine"


class SimulatedRunner:
    """`ModelRunner` whose "KV" of a position is a digest of all ids up to it.

    The digest of a position is read from the slot of the one before, through the block table, as
    attention would. So a wrong table, a stale or foreign block, or a wrong resume changes every
    word that follows. The next id is a function of that digest (and of the seed, unless greedy).
    """

    def __init__(
        self,
        config: SimConfig,
        *,
        words: Ids[int] | None = None,
        end_ids: Ids[int] = (),
        vocab_size: int = 0,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        """`words` = ids to answer with; `sleep` makes steps take their time, None = none at all."""
        self._config = config
        self._end_ids = list(end_ids)
        self._words = words or range(vocab_size or config.vocab_size)
        self._sleep = sleep
        poisons = {
            config.crash_id: "crash",
            config.raise_id: "raise",
            config.oom_id: "oom",
            config.nan_id: "nan",
        }
        self._poisons = {id_: kind for id_, kind in poisons.items() if id_ is not None}
        self._seconds = 0.0
        self._digests = [_UNWRITTEN] * (config.num_blocks * BLOCK_SIZE)
        self.spec = ModelSpec(
            name="simulated",
            vocab_size=vocab_size or config.vocab_size,
            max_model_len=config.max_model_len,
            num_blocks=config.num_blocks,
            block_size=BLOCK_SIZE,
            end_ids=frozenset(end_ids),
            block_bytes=_BLOCK.size,
            kv_dtype="digests",
            kv_fingerprint=_FINGERPRINT,
        )

    def warm_up(self) -> None:
        """Nothing is slow the first time."""

    def execute(self, batch: list[Scheduled]) -> list[Outcome]:
        started = time.monotonic()
        outcomes = [self._compute(row) for row in batch]
        if self._sleep is not None:
            self._sleep(max(0.0, self._step_s(batch) - (time.monotonic() - started)))
        self._seconds += time.monotonic() - started
        return outcomes

    def read_block(self, block: int, into: memoryview) -> None:
        digests = self._digests[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]
        assert _UNWRITTEN not in digests, "copy of KV that was never written"
        _BLOCK.pack_into(into, 0, *digests)

    def write_block(self, block: int, data: memoryview) -> None:
        self._digests[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = _BLOCK.unpack(data)

    def seconds(self) -> dict[str, float]:
        return {"simulated": self._seconds}

    def phase_bound_ms(self, batch: list[Scheduled]) -> int:
        return self._config.bound_ms + int(10_000 * self._step_s(batch))

    def _step_s(self, batch: list[Scheduled]) -> float:
        num_tokens = sum(row.num_tokens for row in batch)
        return (self._config.step_ms + num_tokens * self._config.per_token_us / 1000) / 1000

    def _compute(self, row: Scheduled) -> Outcome:
        sequence, start = row.sequence, row.sequence.num_computed_tokens
        digest = self._digest_at(sequence, start - 1) if start else 0
        to_score = sequence.to_score(row.num_tokens)
        scores = []
        for position, token_id in enumerate(sequence.ids_from(start, row.num_tokens), start):
            digest = _mix(digest, token_id)
            self._digests[_slot(sequence, position)] = digest
            if position in to_score:
                scores.append(self._score(sequence, position + 1, digest))
        outcome = self._sample(sequence, digest) if row.samples else Outcome()
        return outcome if outcome.fault else outcome._replace(scores=tuple(scores))

    def _score(self, sequence: Sequence, position: int, digest: int) -> Score:
        """Of the prompt id at `position`, by the digest of the ids before it."""
        count, rank = sequence.sampling.prompt_logprobs or 0, 1 + digest % 100
        return Score(self._token_logprobs(sequence.prompt_ids[position], digest, count), rank)

    def _sample(self, sequence: Sequence, digest: int) -> Outcome:
        sampling = sequence.sampling
        if not sequence.output_ids:
            match self._poison_of(sequence):
                case "crash":
                    os._exit(70)
                case "raise":
                    raise RuntimeError("the simulated model was told to raise")
                case "oom":
                    raise MemoryError
                case "nan":
                    return Outcome(fault="nan_logits")
        if self._ends_here(sequence):
            return Outcome(self._end_ids[0], self._logprobs(self._end_ids[0], digest, sequence))
        draw = digest if sampling.temperature == 0 else _mix(digest, sampling.seed)
        token_id = self._words[draw % len(self._words)]
        return Outcome(token_id, self._logprobs(token_id, draw, sequence))

    def _poison_of(self, sequence: Sequence) -> str:
        """What the prompt does to the engine; "" for nothing."""
        found = (
            kind for token_id, kind in self._poisons.items() if token_id in sequence.prompt_ids
        )
        return next(found, "")

    def _ends_here(self, sequence: Sequence) -> bool:
        config, sampling = self._config, sequence.sampling
        if not (config.output_tokens_max and self._end_ids) or sampling.ignore_eos:
            return False
        of_prompt = self._digest_at(sequence, len(sequence.prompt_ids) - 1)
        spread = config.output_tokens_max - config.output_tokens_min + 1
        length = config.output_tokens_min + of_prompt % spread
        position = len(sequence.output_ids)
        return position >= max(length - 1, sampling.min_tokens)

    def _logprobs(self, token_id: int, draw: int, sequence: Sequence) -> TokenLogprobs | None:
        count = sequence.sampling.logprobs
        return None if count is None else self._token_logprobs(token_id, draw, count)

    def _token_logprobs(self, token_id: int, draw: int, count: int) -> TokenLogprobs:
        chosen = -(draw % 1000) / 1000
        others = [self._words[(draw + k) % len(self._words)] for k in range(1, count)]
        top_ids = [token_id, *others][:count]
        return TokenLogprobs(chosen, pack_ids(top_ids), tuple(chosen - k for k in range(count)))

    def _digest_at(self, sequence: Sequence, position: int) -> int:
        digest = self._digests[_slot(sequence, position)]
        assert digest != _UNWRITTEN, "read of KV that was never written"
        return digest


def readable_words(vocabulary: Vocabulary) -> list[int]:
    """Ids of plain lower-case words with a space before them, so that answers can be read."""
    return [
        token_id
        for token_id, raw in enumerate(vocabulary.tokens)
        if token_id not in vocabulary.special and _WORD.fullmatch(raw)
    ]


def _slot(sequence: Sequence, position: int) -> int:
    return sequence.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


def _mix(digest: int, value: int) -> int:
    """One step of a 64-bit digest (the finalizer of splitmix64 over a running sum)."""
    x = (digest + value * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
