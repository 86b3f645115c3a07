"""One scheduler whose peers and clock are the test's."""

from typing import Any

from services.scheduler.config import SchedulerConfig
from services.scheduler.scheduler import SchedulerCore
from shared.ids import pack_ids
from shared.messages import (
    Beat,
    Message,
    Renew,
    Renewed,
    RenewLeg,
    Submit,
    ToScheduler,
)
from shared.sampling import SamplingParams

OWN_BEAT = Beat(instance="s", role="scheduler", seq=1)


class Rig:
    """One scheduler alone with this test; `beat` makes workers and detokenizers."""

    def __init__(self, **config: Any) -> None:
        self.now = 100.0
        self.core = SchedulerCore("s", "p", SchedulerConfig(**config), self.now)
        self.alive: dict[str, Beat] = {}
        self.say(OWN_BEAT)

    def lead(self, *names: str) -> "Rig":
        """In office, with these peers (w* = worker, d* = detokenizer) alive."""
        for name in names:
            self.beat(name)
        self.pass_time(1.1)
        assert self.core.is_leader
        self.sent()
        return self

    def beat(self, name: str, **fields: Any) -> None:
        defaults: dict[str, Any] = {
            "role": "gpu_worker" if name[0] == "w" else "detokenizer",
            "free_blocks": 100,
            "block_size": 16,
            "max_legs": 4,
            "max_model_len": 256 if name[0] == "w" else 0,
            "step_tokens": 64,
        }
        seq = self.alive[name].seq + 1 if name in self.alive else 1
        self.alive[name] = Beat(instance=name, seq=seq, **defaults | fields)
        self.say(self.alive[name])

    def say(self, message: ToScheduler) -> None:
        self.core.receive(message, self.now)

    def pass_time(self, seconds: float) -> None:
        """Tick through it while everybody in `alive` beats, as the scheduler itself does."""
        until = self.now + seconds
        while self.now < until:
            for beat in (OWN_BEAT, *self.alive.values()):
                self.say(beat)
            self.pass_silence(min(0.05, until - self.now))

    def pass_silence(self, seconds: float) -> None:
        """Tick through it while nothing is heard, not even the scheduler by itself."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + 0.05, until)
            self.core.tick(self.now)

    def sent(self, kind: type[Message] | None = None) -> list[Any]:
        taken = [(e.subject.rsplit(".", 1)[1], e.message) for e in self.core.outbox.take()]
        return [pair for pair in taken if kind is None or isinstance(pair[1], kind)]

    def submit(self, request_id: str = "r", epoch: int = 1, **fields: Any) -> None:
        self.say(submit(request_id, epoch, **fields))

    def renew(self, request_id: str = "r", epoch: int = 1) -> list[tuple[str, str]]:
        """(state, worker) of each answer."""
        self.sent()
        self.say(Renew(gateway="g", legs=[RenewLeg(request_id, 0, epoch, 0)]))
        return [(leg.state, leg.worker) for _, m in self.sent(Renewed) for leg in m.legs]


def submit(request_id: str = "r", epoch: int = 1, **fields: Any) -> Submit:
    defaults: dict[str, Any] = {
        "gateway": "g",
        "model": "m",
        "tenant": "t",
        "prompt_ids": pack_ids(range(20)),
        "sampling": SamplingParams(max_tokens=10),
        "deadline_ms": 60_000,
    }
    return Submit(request_id=request_id, choice=0, epoch=epoch, **defaults | fields)
