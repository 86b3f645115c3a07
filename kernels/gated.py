"""The gate of a feed-forward layer (Shazeer, 2020): SwiGLU and GeGLU.

y = f(gate) * up        gate_up [rows, 2 * inner] = (gate, up) -> y [rows, inner]

f is silu, x sigmoid(x), or gelu by its tanh approximation (Hendrycks and Gimpel, 2016).
"""

import math

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


def gelu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """The formula in fp32, result in the dtype of the input."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate.pow(3))
    return (0.5 * gate * (1 + torch.tanh(inner)) * up).to(gate_up.dtype)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)
