"""Every core of the mesh on one lossy bus in virtual time: no loop, no thread, no wall clock.

A schedule is a function of its seed. Messages cross the bus as bytes, so each must decode at its
reader. Faults: crashes (announced or silent), stalls, cut connections (noticed or not), and loss,
duplicates and delays that reorder.
"""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.detokenizer.legs import DetokenizerLegs
from services.gateway.events import SessionSpec
from services.gateway.sessions import SessionTable
from services.gpu_worker.engine_core import EngineCore
from services.gpu_worker.simulated import SimulatedRunner
from services.scheduler.config import SchedulerConfig
from services.scheduler.scheduler import SchedulerCore
from shared import subjects
from shared.messages import (
    Beat,
    Died,
    Message,
    ToDetokenizer,
    ToGateway,
    ToScheduler,
    ToTokenizer,
    ToWorker,
    encode,
)
from shared.testing import matches
from tests.protocol_work import (
    DRAWS,
    NUM_BLOCKS,
    SIM,
    VOCABULARY,
    WORDS,
    WORKER,
    Client,
    FakeTokenizer,
    MoodyRunner,
)

POOL = "p"
TICK_S = 0.05
STEP_S = 0.025
RESTART_S = 1.5  # from a crash to the next instance
DRAIN_S = 0.5  # from SIGTERM to the end
HOP_S = 0.0004
PHASE_BOUND_MS = 1000
MAILBOX = {
    "gateway": ToGateway,
    "tokenizer": ToTokenizer,
    "scheduler": ToScheduler,
    "gpu_worker": ToWorker,
    "detokenizer": ToDetokenizer,
}
BEAT_S = {"gpu_worker": 0.1, "detokenizer": 0.1}


@dataclass(eq=False)
class Node:
    """One process: its core, and what the world does to it."""

    name: str
    role: str
    core: Any = None
    instance: str = ""
    patterns: list[str] = field(default_factory=list)
    starts: int = 0
    alive: bool = False
    draining: bool = False
    paused: bool = False
    hung_at: float | None = None  # paused, but its I/O process beats on
    cut: bool = False
    noticed: bool = False  # the client library knows that it is cut
    beats: int = 0
    kept: list[bytes] = field(default_factory=list)  # arrived while paused


@dataclass
class Noise:
    """Chances per delivery."""

    lose: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.3


class Mesh:
    """`Mesh(seed)` is up and led when its constructor returns."""

    def __init__(
        self, seed: int, workers: int = 2, gateways: int = 1, *, moody: bool = False
    ) -> None:
        self.moods: list[int] | None = [] if moody else None
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.noise = Noise()
        self.bus_stands_until = 0.0  # what is sent before arrives then, in order
        self.muted: set[tuple[str, str]] = set()  # (instance, role that does not hear it)
        self.clients: list[Client] = []
        self.sent = 0
        self.decoders = {r: msgspec.msgpack.Decoder(kind) for r, kind in MAILBOX.items()}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        names = {
            "gateway": gateways,
            "tokenizer": 2,
            "scheduler": 2,
            "gpu_worker": workers,
            "detokenizer": 2,
        }
        self.nodes = [Node(f"{r}-{i}", r) for r, number in names.items() for i in range(number)]
        for node in self.nodes:
            self.start(node)
        self.advance(1.6)

    # --- time ---

    def after(self, delay: float, action: Callable[[], None], not_before: float = 0.0) -> None:
        at = max(self.now, not_before) + delay
        heapq.heappush(self._events, (at, next(self._order), action))

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = until

    def until(self, done: Callable[[], bool], bound_s: float) -> float:
        """Advance until `done`; how long that took."""
        started = self.now
        while not done():
            assert self.now - started < bound_s, f"not within {bound_s} s\n{self.describe()}"
            self.advance(0.1)
        return self.now - started

    # --- processes ---

    def of(self, role: str) -> list[Node]:
        return [node for node in self.nodes if node.role == role]

    def start(self, node: Node) -> None:
        node.starts += 1
        node.instance = f"{node.name}-{node.starts}"
        node.core = self._make(node)
        node.alive, node.paused, node.cut, node.kept = True, False, False, []
        node.draining, node.hung_at = False, None
        node.patterns = [subjects.inbox(node.instance), subjects.everyone(node.role)]
        if node.role in ("gateway", "scheduler", "gpu_worker"):
            node.patterns.append(subjects.beacon(POOL))
        if node.role in ("gateway", "scheduler"):
            node.patterns.append(subjects.DIED)
            node.patterns.append(subjects.beat("*" if node.role == "scheduler" else "tokenizer"))
        instance = node.instance
        for period, action in (
            (TICK_S, self._tick),
            (BEAT_S.get(node.role, 0.25), self._beat),
            *([(STEP_S, self._step)] if node.role == "gpu_worker" else []),
        ):
            self._every(node, instance, period, action)

    def _make(self, node: Node) -> Any:
        match node.role:
            case "gateway":
                return SessionTable(node.instance, POOL, random.Random(self.rng.random()))
            case "scheduler":
                return SchedulerCore(node.instance, POOL, SchedulerConfig(), self.now)
            case "gpu_worker":
                return EngineCore(node.instance, self._model(), WORKER, self.now)
            case "detokenizer":
                return DetokenizerLegs(node.instance, VOCABULARY)
        return FakeTokenizer(node.instance)

    def _model(self) -> SimulatedRunner:
        if self.moods is None:
            return SimulatedRunner(SIM, words=DRAWS, end_ids=[0], vocab_size=len(WORDS))
        self.moods.append(len(self.moods))
        return MoodyRunner(self.moods[-1])

    def _every(
        self, node: Node, instance: str, period: float, action: Callable[[Node], None]
    ) -> None:
        def again() -> None:
            if node.instance == instance and node.alive:
                if not node.paused or (node.hung_at is not None and action == self._beat):
                    action(node)
                self.after(period, again)

        self.after(period * self.rng.random(), again)

    def _tick(self, node: Node) -> None:
        node.core.tick(self.now)
        self._flush(node)

    def _step(self, node: Node) -> None:
        node.core.step(self.now)
        self._flush(node)

    def _beat(self, node: Node) -> None:
        node.beats += 1
        beat = Beat(
            instance=node.instance,
            role=node.role,
            seq=node.beats,
            draining=node.draining,
            term=getattr(node.core, "term", 0),
        )
        if node.role == "gpu_worker":
            core = node.core
            beat = msgspec.structs.replace(
                beat,
                load=core.load,
                waiting=core.waiting,
                step=core.num_steps,
                free_blocks=core.free_blocks,
                total_blocks=NUM_BLOCKS,
                block_size=core.spec.block_size,
                phase="decode",
                phase_age_ms=0 if node.hung_at is None else int(1000 * (self.now - node.hung_at)),
                phase_bound_ms=PHASE_BOUND_MS,
                max_legs=WORKER.max_legs,
                max_model_len=core.max_model_len,
                prefill_tokens_waiting=core.prefill_tokens_waiting,
                step_tokens=WORKER.max_batched_tokens,
            )
        elif node.role == "detokenizer":
            beat = msgspec.structs.replace(beat, load=node.core.num_legs)
        self.publish(node, subjects.beat(node.role, node.instance), beat)

    # --- faults ---

    def crash(self, node: Node, *, announced: bool) -> None:
        """The process is gone; a new one comes after a while."""
        if not node.alive:
            return
        node.alive = False
        if announced:
            self.publish(None, subjects.DIED, Died(instance=node.instance, reason="killed"))
        self.after(RESTART_S, lambda: self.start(node))

    def drain(self, node: Node) -> None:
        """SIGTERM: nothing new is taken, what is left goes elsewhere, and a new one comes."""
        if not node.alive or node.draining:
            return
        node.draining = True
        match node.role:
            case "scheduler":
                node.core.resign(self.now)
            case "gpu_worker":
                node.core.refuse_new(self.now)
            case "detokenizer":
                node.core.hand_over()
        self._beat(node)
        self._flush(node)
        instance = node.instance
        self.after(DRAIN_S, lambda: self._leave(node) if node.instance == instance else None)

    def _leave(self, node: Node) -> None:
        if node.alive and node.role == "gpu_worker":
            node.core.move_all(self.now)
            self._flush(node)
        self.crash(node, announced=True)

    def pause(self, node: Node, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        if not node.alive or node.paused:
            return
        node.paused = True
        instance = node.instance
        self.after(seconds, lambda: self._resume(node) if node.instance == instance else None)

    def hang(self, node: Node, seconds: float) -> None:
        """The engine stands still in a step, while its I/O process says so."""
        if node.alive and not node.paused:
            self.pause(node, seconds)
            node.hung_at = self.now

    def _resume(self, node: Node) -> None:
        if not node.alive or not node.paused:
            return
        node.paused, node.hung_at = False, None
        self._tell(node, "slept")
        kept, node.kept = node.kept, []
        for payload in kept:
            self._receive(node, payload)
        self._tick(node)

    def cut(self, node: Node, seconds: float, *, noticed: bool) -> None:
        """The connection carries nothing for a while; its client library may know or not."""
        if not node.alive or node.cut:
            return
        node.cut, node.noticed = True, noticed
        if noticed:
            self._tell(node, "connection_lost")
        instance = node.instance
        self.after(seconds, lambda: self._heal(node) if node.instance == instance else None)

    def _heal(self, node: Node) -> None:
        if node.alive and node.cut:
            node.cut = False
            if node.noticed:
                self._tell(node, "reconnected")
                self._flush(node)

    def mute(self, node: Node, role: str, seconds: float) -> None:
        """A partial partition: everybody of `role` hears nothing of `node` for a while."""
        way = (node.instance, role)
        self.muted.add(way)
        self.after(seconds, lambda: self.muted.discard(way))

    def _tell(self, node: Node, what: str) -> None:
        hook = getattr(node.core, what, None)
        if hook is not None:
            hook(self.now)

    # --- the bus ---

    def publish(self, sender: Node | None, subject: str, message: Message) -> None:
        if sender is not None and sender.cut:
            return
        self.sent += 1
        payload = encode(message)
        for node in self.nodes:
            if sender is not None and (sender.instance, node.role) in self.muted:
                continue
            if node.alive and any(matches(pattern, subject) for pattern in node.patterns):
                self._send(node, payload)

    def _send(self, node: Node, payload: bytes) -> None:
        noise, draw, stands_until = self.noise, self.rng.random, self.bus_stands_until
        if draw() < noise.lose:
            return
        instance = node.instance
        for _ in range(2 if draw() < noise.duplicate else 1):
            late = draw() * noise.delay_s if draw() < noise.delay else 0.0
            self.after(HOP_S + late, lambda: self._arrive(node, instance, payload), stands_until)

    def _arrive(self, node: Node, instance: str, payload: bytes) -> None:
        if not node.alive or node.instance != instance or node.cut:
            return
        if node.paused:
            node.kept.append(payload)
        else:
            self._receive(node, payload)

    def _receive(self, node: Node, payload: bytes) -> None:
        node.core.receive(self.decoders[node.role].decode(payload), self.now)
        self._flush(node)

    def _flush(self, node: Node) -> None:
        for subject, message in node.core.outbox.take():
            self.publish(node, subject, message)

    # --- the workload ---

    def open(self, spec: SessionSpec, number: int = 0) -> Client:
        client = Client(spec, number)
        self.clients.append(client)
        gateway = self.rng.choice(self.of("gateway"))
        gateway.core.open(spec, client.emit, self.now)
        self._flush(gateway)
        return client

    def cancel(self, client: Client) -> None:
        client.cancelled = client.end is None
        for gateway in self.of("gateway"):
            gateway.core.cancel(client.spec.request_id, "client", self.now)
            self._flush(gateway)

    def calm(self) -> bool:
        """Every process is up, awake and connected, and the bus is quiet."""
        nodes = all(node.alive and not node.paused and not node.cut for node in self.nodes)
        quiet = self.noise == Noise() and not self.muted and self.now >= self.bus_stands_until
        return nodes and quiet

    def ended(self) -> bool:
        return all(client.end is not None for client in self.clients)

    def describe(self) -> str:
        lines = []
        for client in self.clients:
            if client.end is None:
                legs = [
                    leg
                    for gateway in self.of("gateway")
                    if (session := gateway.core.session(client.spec.request_id))
                    for leg in session.legs
                ]
                lines.append(f"{client.spec.request_id}: {legs}")
        lines += [f"{n.instance} alive={n.alive} {n.paused=} {n.cut=}" for n in self.nodes]
        return "\n".join(lines)
