"""The gate of a SwiGLU feed-forward layer (Shazeer, 2020).

y = silu(gate) * up        gate_up [rows, 2 * inner] = (gate, up) -> y [rows, inner]
"""

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch import Tensor


def silu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """The formula in fp32, result in the dtype of the input."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
