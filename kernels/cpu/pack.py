"""Weights as the compiled step takes them: int8 per output, in panels of 16 outputs.

W ~ scales[out] * weights[out][in]        scales = max |W| / 127
"""

from typing import NamedTuple

import torch
from torch import Tensor

PANEL = 16  # outputs
STEP = 64  # inputs of one product on the matrix unit
GROUP_MAX = 512  # inputs. On the matrix unit, 32 rows: groups of 64 make a product 1.5 to 2.1 times
# as long, of 192 and 512 1.05 to 1.1 times


class PackedMatrix(NamedTuple):
    """See `Matrix` in gemm.h; `out` and `in_` are padded with zeros."""

    weights: Tensor  # int8 [out / 16, in / 4, 16, 4]
    scales: Tensor  # fp32 [out]
    offsets: Tensor  # int32 [in / group, out]
    bias: Tensor | None  # fp32 [out]

    @property
    def out(self) -> int:
        return len(self.scales)

    @property
    def in_(self) -> int:
        return 4 * self.weights.shape[1]

    @property
    def group(self) -> int:
        """Inputs that share a scale of the activations."""
        return self.in_ // len(self.offsets)


def padded(count: int, unit: int = STEP) -> int:
    return -(-count // unit) * unit


def pack(weight: Tensor, bias: Tensor | None = None, *, grouped: bool = False) -> PackedMatrix:
    """`weight` [out, in], padded to whole panels and steps; `grouped` = activations have a scale
    per at most `GROUP_MAX` inputs instead of one per row.
    """
    rows, columns = padded(weight.shape[0], PANEL), padded(weight.shape[1])
    whole = weight.new_zeros(rows, columns, dtype=torch.float32)
    whole[: weight.shape[0], : weight.shape[1]] = weight
    scales = whole.abs().amax(-1) / 127
    steps = whole.div_(scales.clamp_min(1e-30)[:, None]).round_().to(torch.int8)
    group = _group(columns) if grouped else columns
    sums = steps.view(rows, -1, group).sum(-1, dtype=torch.int32)
    panels = steps.view(rows // PANEL, PANEL, columns // 4, 4).transpose(1, 2).contiguous()
    wide = None
    if bias is not None:
        wide = bias.new_zeros(rows, dtype=torch.float32)
        wide[: len(bias)] = bias
    return PackedMatrix(panels, scales, (128 * sums).t().contiguous(), wide)


def _group(columns: int) -> int:
    """The most inputs of a group that leaves no rest."""
    return max(size for size in range(STEP, GROUP_MAX + 1, STEP) if columns % size == 0)


def pad_blocks(weight: Tensor, blocks: int, size: int, dim: int) -> Tensor:
    """Pad each of `blocks` equal blocks along `dim` to `size` with zeros (heads, gate and up)."""
    shape = list(weight.shape)
    old = shape[dim] // blocks
    if old == size:
        return weight
    split = weight.reshape(*shape[:dim], blocks, old, *shape[dim + 1 :])
    out = split.new_zeros(*shape[:dim], blocks, size, *shape[dim + 1 :])
    out.narrow(dim + 1, 0, old).copy_(split)
    return out.flatten(dim, dim + 1)
