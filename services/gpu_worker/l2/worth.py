"""Whether L2 gives blocks faster than they are computed, by what both took lately. Pure.

load of n blocks = fixed + n * per_block        computing them = n * block_size * per_id
"""

import math

from services.gpu_worker.pace import Average

_MARGIN = 1.5  # times faster a load must be: it takes CPU elsewhere, and may come back short
_LOOK_AGAIN_S = 10.0  # where loads are not worth it: one that shows what they take now


class Worth:
    """`Worth(floor)`: fewer blocks than `floor` are never asked for, and before anything is
    measured as many as that are worth it. A floor of 0 = always ask.
    """

    def __init__(self, floor: int, block_size: int) -> None:
        self._floor = floor
        self._block_size = block_size
        self._fixed = Average(keep=0.8)
        self._per_block = Average(keep=0.8)
        self._looked_at = 0.0

    def loaded(self, blocks: int, seconds: float, *, undisturbed: bool) -> None:
        """A lookup gave so many blocks after so long. `undisturbed`: the engine waited for it; else
        it may have come earlier, so that only a short time says something.
        """
        if not blocks:
            if undisturbed or seconds < self._fixed.value:
                self._fixed.add(seconds, 1)
        elif undisturbed or seconds < self._load_s(blocks):
            self._per_block.add(max(0.0, seconds - self._fixed.value), blocks)

    def min_blocks(self, per_id_s: float, now: float) -> int | None:
        """The smallest prefix that is worth a load where an id takes so long to compute; None = no
        prefix is.
        """
        if not self._floor or not per_id_s:
            return self._floor
        gain = self._block_size * per_id_s - _MARGIN * self._per_block.value
        if gain > 0:
            return max(self._floor, math.ceil(_MARGIN * self._fixed.value / gain))
        return self._floor if now - self._looked_at >= _LOOK_AGAIN_S else None

    def asked(self, now: float) -> None:
        """A lookup is on its way."""
        self._looked_at = now

    def _load_s(self, blocks: int) -> float:
        return self._fixed.value + blocks * self._per_block.value
