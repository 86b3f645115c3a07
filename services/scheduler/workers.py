"""Which workers and detokenizers live, and what each has in hand. Pure."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from services.scheduler.prefixes import Prefixes
from shared.liveness import LastHeard
from shared.messages import Beat, BlocksChanged

SETTLE_S = 0.15  # what was sent so long before its engine's phase began is in a beat: beat and way
TRIAL_S = 0.2  # from a suspect's first id to its text, or to word of its detokenizer's death
REMEMBER_S = 10.0  # a new leader repeats losses for so long
DEAD_MAX = 4096  # instances known to be dead for good

Key = tuple[str, int]  # request_id, choice


class Sent(NamedTuple):
    """A leg sent to a peer whose beats do not show it yet."""

    key: Key
    at: float
    tokens: int
    blocks: int


@dataclass(slots=True, eq=False)
class Peer:
    """A worker or a detokenizer: its last beat, and what changed since."""

    beat: Beat
    hung: bool = False
    prefixes: Prefixes = field(default_factory=Prefixes)  # a worker's
    sent: dict[Key, Sent] = field(default_factory=dict)  # oldest first
    sent_tokens: int = 0
    sent_blocks: int = 0
    ended: int = 0  # legs that ended since the last beat
    quarantine: bool = False  # all legs here were suspects: their workers had died
    alone: Key | None = None  # the suspect that is on trial: nothing else is sent here
    alone_at: float = 0.0
    alone_step: int = 0
    alone_ended: bool = False
    outlived_at: float = 0.0  # since then it has ended or is known to have an id

    @property
    def instance(self) -> str:
        return self.beat.instance

    @property
    def placeable(self) -> bool:
        return self.beat.ready and not self.beat.draining and not self.hung

    @property
    def num_legs(self) -> int:
        """Legs there now, as far as known."""
        return max(0, self.beat.load + self.beat.waiting - self.ended) + len(self.sent)

    @property
    def prefill_tokens(self) -> int:
        """Prompt ids there that wait to be computed."""
        return self.beat.prefill_tokens_waiting + self.sent_tokens

    @property
    def free_blocks(self) -> int:
        return self.beat.free_blocks - self.sent_blocks

    def hear(self, beat: Beat, now: float) -> None:
        stepped = beat.step != self.beat.step
        self.beat = beat
        self.ended = 0
        taken = now - beat.phase_age_ms / 1000 - SETTLE_S  # inside a step an engine takes nothing
        while self.sent and next(iter(self.sent.values())).at <= taken:
            self._shown(next(iter(self.sent)))
        if self.hung and (stepped or not overdue(beat)):
            self.hung = False
        if self.alone in self.sent:
            self.alone_step = beat.step  # it was not in this step
        # Nobody waits for a first id, so the suspect has one.
        decodes = beat.phase == "decode" and not beat.prefill_tokens_waiting
        outlived = self.alone not in self.sent and decodes and beat.step > self.alone_step
        if not outlived and not self.alone_ended:
            self.outlived_at = now
        if now - self.outlived_at >= TRIAL_S or (not self.num_legs and now - self.alone_at > 1.0):
            self.alone = None

    def isolate(self, key: Key, now: float) -> None:
        """Give the worker to a leg whose workers died, until it has outlived that. Those that were
        on trial here before may stay: they are the only ones that the next suspect can hurt.
        """
        self.quarantine = True
        self.alone, self.alone_at, self.alone_step = key, now, self.beat.step
        self.outlived_at, self.alone_ended = now, False

    def send(self, sent: Sent) -> None:
        """A leg is on its way there."""
        self._shown(sent.key)
        self.quarantine = self.quarantine and sent.key == self.alone
        self.sent[sent.key] = sent
        self.sent_tokens += sent.tokens
        self.sent_blocks += sent.blocks

    def end(self, key: Key) -> None:
        """A leg has left."""
        if self.alone == key:
            self.alone_ended = True
        if not self._shown(key):
            self.ended += 1

    def _shown(self, key: Key) -> bool:
        """Count a leg that was on its way no more; False if none was."""
        sent = self.sent.pop(key, None)
        if sent is None:
            return False
        self.sent_tokens -= sent.tokens
        self.sent_blocks -= sent.blocks
        return True


def overdue(beat: Beat) -> bool:
    """Whether the worker's engine is in one phase for longer than it said it could be."""
    return 0 < beat.phase_bound_ms < beat.phase_age_ms


class Gone(NamedTuple):
    """A peer that is dead, or `hung`: silent or stuck, not known to have ended. Silence is no proof
    of a death: legs of workers that were paused are not suspected of having killed them.
    """

    instance: str
    hung: bool


class Peers:
    """All workers and detokenizers heard of, and those lost in the last seconds. Of what workers
    hold in L1, at most `known_blocks_max` blocks are known.
    """

    def __init__(self, known_blocks_max: int = 1 << 20) -> None:
        self.workers: dict[str, Peer] = {}
        self.detokenizers: dict[str, Peer] = {}
        self._heard = LastHeard()
        self._dead: OrderedDict[str, None] = OrderedDict()
        self._recent: deque[tuple[float, Gone]] = deque()
        self._known_blocks_max = known_blocks_max

    def hear(self, beat: Beat, now: float) -> None:
        """Take a beat; one that a dead instance sent before its end is ignored."""
        table = {"gpu_worker": self.workers, "detokenizer": self.detokenizers}.get(beat.role)
        if table is None or beat.instance in self._dead:
            return
        self._heard.heard(beat.instance, now)
        peer = table.get(beat.instance)
        if peer is None:
            table[beat.instance] = Peer(beat)
        elif beat.seq >= peer.beat.seq:
            peer.hear(beat, now)

    def blocks_changed(self, message: BlocksChanged, now: float) -> bool:
        """Take what a worker tells of its L1; False = there is no room for it."""
        worker = self.workers.get(message.worker)
        if worker is None:
            return True
        room = self._known_blocks_max - self.known_blocks + len(worker.prefixes)
        return worker.prefixes.take(message, worker.beat.total_blocks, room, now)

    @property
    def known_blocks(self) -> int:
        """Cached at workers, as far as they have told."""
        return sum(len(worker.prefixes) for worker in self.workers.values())

    def to_ask(self, now: float) -> list[str]:
        """Workers of whose L1 something is not known; the same one once a second."""
        if not self._known_blocks_max:
            return []
        return [
            worker.instance
            for worker in self.workers.values()
            if worker.placeable and worker.beat.total_blocks and worker.prefixes.asks(now)
        ]

    def died(self, instance: str, now: float) -> Gone | None:
        """The process is known to be gone; None when it was no peer of ours, or known before."""
        self._dead[instance] = None
        if len(self._dead) > DEAD_MAX:
            self._dead.popitem(last=False)
        return self._lose(Gone(instance, hung=False), now) if instance in self._heard else None

    def tick(self, now: float) -> list[Gone]:
        """Peers that fell silent, and workers that hang since the last tick."""
        gone = [self._lose(Gone(name, hung=True), now) for name in self._heard.silent(now)]
        for worker in self.workers.values():
            if not worker.hung and overdue(worker.beat):
                worker.hung = True
                gone.append(self._remember(Gone(worker.instance, hung=True), now))
        return gone

    def recent(self, now: float) -> list[Gone]:
        """What was lost lately and is not back, oldest first."""
        while self._recent and now - self._recent[0][0] > REMEMBER_S:
            self._recent.popleft()
        return [gone for _, gone in self._recent if not self.usable(gone.instance)]

    def usable(self, instance: str) -> bool:
        """Whether this worker or detokenizer lives and does not hang."""
        peer = self.workers.get(instance) or self.detokenizers.get(instance)
        return peer is not None and not peer.hung

    def named(self, worker: str, detokenizer: str) -> list[Peer]:
        """The two that have a leg in hand, as far as they live."""
        pair = self.workers.get(worker), self.detokenizers.get(detokenizer)
        return [peer for peer in pair if peer is not None]

    def restart(self, now: float) -> None:
        """We slept or were cut off: nobody has been silent before `now`."""
        self._heard.restart(now)

    def _lose(self, gone: Gone, now: float) -> Gone:
        self._heard.forget(gone.instance)
        self.workers.pop(gone.instance, None)
        self.detokenizers.pop(gone.instance, None)
        return self._remember(gone, now)

    def _remember(self, gone: Gone, now: float) -> Gone:
        self._recent.append((now, gone))
        return gone
