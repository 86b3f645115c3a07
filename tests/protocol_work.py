"""What the mesh of the protocol test is asked: requests, and the client that reads the answers."""

import random
import zlib
from typing import Any

from services.detokenizer.legs import DetokenizerLegs
from services.gateway.events import Delta, Opening, SessionEnd, SessionEvent, SessionSpec
from services.gpu_worker.config import SimConfig, WorkerConfig
from services.gpu_worker.runner import Outcome, Scheduled
from services.gpu_worker.sequence import Sequence
from services.gpu_worker.simulated import SimulatedRunner
from shared import subjects
from shared.core import Outbox
from shared.ids import pack_ids, unpack_ids
from shared.kv import block_hashes
from shared.messages import (
    End,
    Generate,
    StepDone,
    StepRecord,
    TextContext,
    TextDelta,
    Tokenized,
    TokenizedPrompt,
)
from shared.model_files import Vocabulary
from shared.sampling import SamplingParams, TextParams

NUM_BLOCKS = 48  # small enough that eight legs preempt one another

# Whole characters, halves of characters, and pieces that spell stop strings across tokens.
WORDS = [b"<end>", *(bytes([97 + i]) for i in range(26)), b"ab", b"stop", b"st", b"op", b" "]
WORDS += ["é".encode()[:1], "é".encode()[1:], "鯨".encode()[:2], "鯨".encode()[2:], "🐟".encode()]
NUM_ODD = len(WORDS)
WORDS += [bytes([97 + i, 97 + j]) for i in range(16) for j in range(15)]
DRAWS = [*range(1, NUM_ODD)] * 6 + [*range(NUM_ODD, len(WORDS))]  # half of all ids are odd ones
VOCABULARY = Vocabulary(WORDS, special=[0], end_ids=[0])
SIM = SimConfig(
    num_blocks=NUM_BLOCKS, max_model_len=256, output_tokens_min=20, output_tokens_max=90
)
WORKER = WorkerConfig(engine="sim", max_legs=8, max_batched_tokens=48)


class FakeTokenizer:
    """A tokenizer for prompts that are ids already; a function, as the real one is."""

    def __init__(self, instance: str) -> None:
        self.outbox = Outbox()
        self.instance = instance

    def receive(self, message: Any, _now: float) -> None:
        if isinstance(message, Generate):
            prompts = [
                TokenizedPrompt(ids, b"".join(block_hashes(unpack_ids(ids), message.salt)))
                for ids in message.ids or []
            ]
            tokenized = Tokenized(
                request_id=message.request_id,
                attempt=message.attempt,
                tokenizer=self.instance,
                prompts=prompts,
            )
            self.outbox.put(subjects.inbox(message.gateway), tokenized)

    def tick(self, now: float) -> None:
        """Nothing waits here."""


class MoodyRunner(SimulatedRunner):
    """A model whose every instance answers in its own way, as in low precision they do.

    Its ids follow from all ids before and the mood. So a stream that mixes two runs of a leg
    shows: an id in it follows from what stands before it in nobody's mood.
    """

    def __init__(self, mood: int) -> None:
        super().__init__(SIM, words=DRAWS, end_ids=[0], vocab_size=len(WORDS))
        self._mood = mood

    def execute(self, batch: list[Scheduled]) -> list[Outcome]:
        return [
            outcome._replace(token_id=next_id(row.sequence, self._mood))
            if outcome.token_id
            else outcome
            for row, outcome in zip(batch, super().execute(batch), strict=True)
        ]


def next_id(sequence: Sequence, mood: int) -> int:
    return moody_id(sequence.prompt_ids + sequence.output_ids, mood)


def moody_id(before: list[int], mood: int) -> int:
    """What an instance in this mood says after `before`."""
    return DRAWS[zlib.crc32(pack_ids([*before, mood])) % len(DRAWS)]


def text_of(client: "Client", choice: int) -> tuple[str, str]:
    """Text and finish reason of the ids that were delivered, found in one go, without a mesh."""
    ids, spec = client.ids[choice], client.spec
    legs = DetokenizerLegs("d", VOCABULARY)
    context = TextContext(prompt_tail=b"", output_ids=b"", text=spec.text)
    end: End = "stop" if ids[-1] == 0 else "length"
    record = StepRecord("r", choice, 1, "g", 0, pack_ids(ids), end, None, context)
    legs.receive(StepDone(worker="w", step=1, records=[record]), 0.0)
    delta = next(e.message for e in legs.outbox.take() if isinstance(e.message, TextDelta))
    return delta.records[0].text, delta.records[0].finish_reason


class Client:
    """Reads one session, and fails at once when its events are not what was promised."""

    def __init__(self, spec: SessionSpec, number: int) -> None:
        self.spec = spec
        self.number = number  # of the spec
        self.ids: dict[int, list[int]] = {}
        self.text: dict[int, str] = {}
        self.finish: dict[int, tuple[str, Any]] = {}
        self.logprobs: dict[int, list[Any]] = {}
        self.end: SessionEnd | None = None
        self.cancelled = False

    def emit(self, event: SessionEvent) -> None:
        assert self.end is None, f"{event} after the end"
        match event:
            case Opening():
                prompts = event.tokenized.prompts
                assert [unpack_ids(prompt.prompt_ids) for prompt in prompts] == self.spec.ids
            case Delta():
                ids = self.ids.setdefault(event.choice, [])
                assert event.choice not in self.finish, "ids after the finish"
                assert event.index == len(ids), f"index {event.index}, delivered {len(ids)}"
                ids += event.ids
                self.text[event.choice] = self.text.get(event.choice, "") + event.text
                self.logprobs.setdefault(event.choice, []).extend(event.logprobs or [])
                if event.finish_reason:
                    self.finish[event.choice] = (event.finish_reason, event.stop_reason)
            case SessionEnd():
                self.end = event
                assert event.completion_tokens == sum(map(len, self.ids.values()))

    def outcome(self) -> tuple[Any, ...]:
        return self.ids, self.text, self.finish, self.logprobs


def make_spec(number: int, request_id: str = "") -> SessionSpec:
    """Request `number` of the workload; the same number is the same request in every schedule."""
    rng = random.Random(number)
    prompts = [
        [rng.randrange(1, len(WORDS)) for _ in range(rng.randint(1, 70))]
        for _ in range(rng.choice([1, 1, 1, 2]))
    ]
    return SessionSpec(
        request_id=request_id or f"{number:032x}",
        model="sim",
        tenant=rng.choice("abc"),
        ids=prompts,
        n=rng.choice([1, 1, 2]),
        max_tokens=rng.choice([1, 40, 80, 80, None]),
        seed=rng.getrandbits(32),
        sampling=SamplingParams(
            max_tokens=0,
            temperature=rng.choice([0.0, 1.0]),
            logprobs=rng.choice([None, None, 2]),
        ),
        text=TextParams(
            stop=rng.choice([(), (), (), ("stop",), ("ké", "aa"), ("stopst",)]),
            include_stop_str=rng.random() < 0.3,
        ),
        priority=rng.randint(0, 2),
        timeout_s=120.0,
    )
