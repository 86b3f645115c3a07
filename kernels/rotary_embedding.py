"""Rotary position embedding (Su et al., 2021), in the half-rotation order of Hugging Face.

    (y1, y2) = (x1 cos - x2 sin, x2 cos + x1 sin)        x = (x1, x2) [rows, heads, head_dim]

Row r at position p turns pair i by p * base^(-2i / head_dim). Pairs are (i, i + head_dim / 2).
"""

import torch
from torch import Tensor


def rotary_table(inverse_frequencies: Tensor, length: int) -> Tensor:
    """Factors of every position below `length`: fp32 [length, 2, 1, head_dim], which are
    (cos, cos) for x itself and (-sin, sin) for x with its halves exchanged.

    Angles are formed in fp64: at position 8,000 fp32 angles are off by up to 5e-4.
    """
    angles = torch.outer(torch.arange(length, dtype=torch.float64), inverse_frequencies.double())
    cos, sin = angles.cos(), angles.sin()
    factors = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
    return factors.float()[:, :, None]


def rotary_embedding_reference(x: Tensor, angles: Tensor) -> Tensor:
    """The formula by complex numbers, (x1 + i x2) * exp(i angle); `angles` [rows, head_dim / 2]."""
    x1, x2 = x.float().chunk(2, dim=-1)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    turned = torch.complex(x1.contiguous(), x2.contiguous()) * turn
    return torch.cat((turned.real, turned.imag), dim=-1).to(x.dtype)


def rotary_embedding_(x: Tensor, factors: Tensor) -> None:
    """Turn `x` [rows, heads, head_dim] in place by its rows of `rotary_table`; fp32 inside. Dims
    that the table does not cover stay as they are.
    """
    x = x[..., : factors.shape[-1]]
    exchanged = x.roll(x.shape[-1] // 2, dims=-1)
    x.copy_(torch.addcmul(x * factors[:, 0], exchanged, factors[:, 1]))
