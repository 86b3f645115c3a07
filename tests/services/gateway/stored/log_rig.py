"""A log in memory and gateways whose every step is a test's choice. No loop, no clock, no bus."""

from collections import Counter
from dataclasses import dataclass, field

from services.gateway.events import Delta, SessionEnd
from services.gateway.stored.config import StoredConfig
from services.gateway.stored.events import Event, Opened, Submitted, decode_event, encode_event
from services.gateway.stored.execution import (
    Append,
    Begin,
    Drop,
    Execution,
    Outcome,
    Read,
    Step,
    Stop,
    Wait,
)
from services.gateway.stored.log import Log
from shared.ids import pack_ids
from shared.messages import Tokenized, TokenizedPrompt

PROMPT = [7, 8]
LENGTHS = {0: 5, 1: 3}  # ids of each choice
SUBMITTED = Submitted(tenant="t", endpoint="chat", body=b"{}", created=0.0, timeout_s=100.0)


def token(choice: int, index: int) -> int:
    return 100 * choice + index


def text(choice: int) -> str:
    """What a calm run says."""
    return "".join(f"{token(choice, index)} " for index in range(LENGTHS[choice]))


class Wire:
    """What the server holds: appends with compare-and-swap. `log` reads along and refuses what no
    log may hold.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[int, bytes]] = []
        self.log = Log()
        self.seq = 0
        self.append(encode_event(SUBMITTED), 0)

    @property
    def last(self) -> int:
        return self.entries[-1][0] if self.entries else 0

    def append(self, payload: bytes, last: int) -> int:
        """The new sequence; 0 = refused."""
        if last != self.last:
            return 0
        self.seq += 3  # other subjects share the stream
        self.log.add(self.seq, decode_event(payload))
        self.entries.append((self.seq, payload))
        return self.seq

    def put(self, event: Event) -> None:
        assert self.append(encode_event(event), self.last)

    def purge(self) -> None:
        self.entries, self.log = [], Log()

    def events(self) -> list[Event]:
        return [decode_event(payload) for _, payload in self.entries]


@dataclass
class Session:
    """What a mesh would deliver from where it was asked to go on."""

    at: dict[int, int]
    ended: bool = False


@dataclass
class Gateway:
    """One execution, driven step by step; a gateway that is paused is one that a test leaves."""

    name: str
    wire: Wire
    config: StoredConfig = field(default_factory=StoredConfig)
    seed: int = 5
    now: float = 0.0
    wall: float = 0.0
    counters: Counter[str] = field(default_factory=Counter)
    session: Session | None = None
    outcome: Outcome | None = None
    epochs: list[int] = field(default_factory=list)
    flying: list[tuple[bytes, int]] = field(default_factory=list)  # appends on their way

    decided: Step | None = None

    def __post_init__(self) -> None:
        self.execution = Execution(self.name, self.config, self.counters)

    def peek(self) -> Step:
        """What it has decided to do next. Whatever happens before `step`, it does that."""
        if self.decided is None:
            self.decided = self.execution.next(self.now, self.wall)
        return self.decided

    def step(self, fate: str = "ok") -> Step:
        """Do one step. `fate` of an append or a read: "ok", "lost" (never arrives), "unheard" (it
        arrives, the answer does not) or "late" (it arrives when `land` says so).
        """
        step, self.decided = self.peek(), None
        match step:
            case Read():
                if fate == "ok":
                    self._read(step.after)
            case Append():
                self._append(step, fate)
            case Begin():
                assert self.session is None
                log = self.execution.log
                self.session = Session({c: len(log.choices[c].ids) for c in LENGTHS})
                self.epochs.append(step.epoch)
                if log.opened is None:
                    self.execution.opened(self._opened())
            case Drop():
                self.session = None
            case Stop():
                self.outcome = step.outcome
            case Wait():
                pass
        return step

    def deliver(self, ids_max: int = 1) -> None:
        """The mesh delivers what comes next of every choice, and the end behind the last."""
        if self.session is None or self.session.ended:
            return
        for choice, length in LENGTHS.items():
            start = self.session.at[choice]
            stop = min(start + ids_max, length)
            if start < length:
                self._deliver(choice, start, stop)
        if all(self.session.at[choice] >= length for choice, length in LENGTHS.items()):
            self.session.ended = True
            self.execution.ended(SessionEnd(None, 0, 0, 1))

    def hear(self) -> None:
        self.execution.heard(self.wire.last)

    def land(self) -> None:
        """The oldest append that was on its way arrives."""
        if self.flying:
            self.wire.append(*self.flying.pop(0))

    def run(self, steps: int = 200) -> Outcome:
        """Go on undisturbed to the end."""
        for _ in range(steps):
            if isinstance(self.step(), Stop):
                assert self.outcome is not None
                assert self.session is None, "a session is left"
                return self.outcome
            self.deliver()
            self.now += 0.3
        raise AssertionError(f"no end: {self.wire.events()}")

    # --- inside ---

    def _opened(self) -> Opened:
        prompts = [TokenizedPrompt(pack_ids(PROMPT))]
        told = Tokenized(request_id="r", attempt=1, tokenizer="t", prompts=prompts)
        return Opened(tokenized=told, seed=self.seed, max_model_len=100)

    def _read(self, after: int) -> None:
        entries = [entry for entry in self.wire.entries if entry[0] >= after]
        if after and (not entries or entries[0][0] != after):
            self.execution.gone()
        else:
            self.execution.read([entry for entry in entries if entry[0] > after])

    def _append(self, step: Append, fate: str) -> None:
        if fate == "ok":
            seq = self.wire.append(step.payload, step.last)
            if seq:
                self.execution.appended(seq, self.now)
            else:
                self.execution.refused()
            return
        if fate == "unheard":
            self.wire.append(step.payload, step.last)
        elif fate == "late":
            self.flying.append((step.payload, step.last))
        self.execution.unsure()

    def _deliver(self, choice: int, start: int, stop: int) -> None:
        assert self.session is not None
        self.session.at[choice] = stop
        ids = [token(choice, index) for index in range(start, stop)]
        self.execution.delivered(
            Delta(
                choice,
                start,
                ids,
                "".join(f"{each} " for each in ids),
                "stop" if stop == LENGTHS[choice] else "",
            ),
            self.now,
        )
