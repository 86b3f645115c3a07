"""L2 as the engine core has it: told of messages, legs and time."""

from collections import Counter

from services.gpu_worker.batcher import Batcher
from services.gpu_worker.config import WorkerConfig
from services.gpu_worker.l2.link import Known, Link
from services.gpu_worker.l2.loads import Loads
from services.gpu_worker.l2.stores import Stores
from services.gpu_worker.runner import ModelRunner
from services.gpu_worker.sequence import Sequence
from shared.core import Outbox
from shared.messages import Beat, BlocksFound, BlocksStored

_KNOWN_S = 40.0  # a leg that needs a block again after so long makes it a second use; and what is
# known is kept until L2 is told the next time that it is needed
_KNOWN_MAX = 65536  # blocks of which L2 said that it has them
_COPY_SHARE = 0.05  # of a step: a long one computes as much as `l2_copy_bytes` would bring


class SecondLevel:
    """Loads what legs lack before they begin, stores what they have computed.

    Everything here may fail, and then a leg has waited `l2_answer_s` for nothing. While no kv_tier
    of this host was heard nothing is done at all.
    """

    def __init__(
        self,
        worker: str,
        runner: ModelRunner,
        batcher: Batcher,
        config: WorkerConfig,
        outbox: Outbox,
        counters: Counter[str],
    ) -> None:
        self._batcher = batcher
        self._link = Link(worker, runner, config, outbox, counters)
        known = Known(_KNOWN_S, _KNOWN_MAX)
        self._loads = Loads(self._link, batcher, known)
        self._stores = Stores(self._link, batcher, known)
        self._blocks_per_step = max(1, config.l2_copy_bytes // max(1, runner.spec.block_bytes))
        self._step_s = 0.0

    def receive(self, message: Beat | BlocksFound | BlocksStored, now: float) -> None:
        match message:
            case Beat():
                self._link.heard(message, now)
                self._batcher.asks_first = self._link.is_open
            case BlocksFound():
                self._loads.found(message, now)
            case BlocksStored():
                self._stores.stored(message, now)

    def deaf(self) -> None:
        """The connection is down."""
        self._link.deaf()

    def tick(self, now: float, *, stepped: bool) -> None:
        """Once between two steps; copies little while legs run, since they wait for it."""
        if not self._link.is_open:
            return
        before = self._link.copy_s
        budget = self._budget()
        copied = self._loads.tick(
            now, budget if self._batcher.running else 1 << 30, stepped=stepped
        )
        self._stores.tick(now + self._link.copy_s - before, max(1, budget - copied))
        self._link.collect(now)

    def took(self, seconds: float) -> None:
        """The last step lasted so long."""
        self._step_s = seconds

    def is_loading(self, sequence: Sequence) -> bool:
        """Whether its leg is held back for blocks that may come."""
        return sequence in self._loads

    def computed(self, sequence: Sequence, now: float) -> None:
        """The model was sound at the last id: the blocks before it may be stored."""
        if self._link.is_open:
            self._stores.offer(sequence, now)

    def forget(self, sequence: Sequence) -> None:
        """Its leg has ended."""
        self._loads.forget(sequence)

    def seconds(self) -> dict[str, float]:
        """Time that the engine spent on copies."""
        return {"l2_copy": self._link.copy_s}

    def wake_at(self, now: float) -> float | None:
        """When `tick` has something to do though no message comes and no step is taken."""
        if not self._link.is_open:
            return None
        lending = self._link.lending.wake_at()
        times = (self._loads.wake_at(now), self._stores.wake_at(now), lending)
        return min((at for at in times if at is not None), default=None)

    def close(self) -> None:
        self._link.close()

    def _budget(self) -> int:
        """Blocks that may be copied before the next step."""
        link = self._link
        if not link.copy_s:
            return self._blocks_per_step
        in_share = _COPY_SHARE * self._step_s * link.num_copied / link.copy_s
        return max(self._blocks_per_step, int(in_share))
