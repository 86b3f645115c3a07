"""Rotary position embedding (Su et al., 2021), in the half-rotation order of Hugging Face.

    (y1, y2) = (x1 cos - x2 sin, x2 cos + x1 sin)        x = (x1, x2) [rows, heads, head_dim]

Row r at position p turns pair i by p * base^(-2i / head_dim). Pairs are (i, i + head_dim / 2).
"""

import torch
from torch import Tensor


def rotary_table(inverse_frequencies: Tensor, length: int) -> Tensor:
    """Cosine and sine of every position below `length`: fp32 [length, 2, head_dim / 2].

    Angles are formed in fp64: at position 8,000 fp32 angles are off by up to 5e-4.
    """
    angles = torch.outer(torch.arange(length, dtype=torch.float64), inverse_frequencies.double())
    return torch.stack((angles.cos(), angles.sin()), dim=1).float()


def rotary_embedding_reference(x: Tensor, cos_sin: Tensor) -> Tensor:
    """The formula by complex numbers: (x1 + i x2) * exp(i angle)."""
    x1, x2 = x.float().chunk(2, dim=-1)
    turn = torch.complex(cos_sin[:, 0], cos_sin[:, 1])[:, None]
    turned = torch.complex(x1.contiguous(), x2.contiguous()) * turn
    return torch.cat((turned.real, turned.imag), dim=-1).to(x.dtype)


def rotary_embedding(x: Tensor, cos_sin: Tensor) -> Tensor:
    """`x` [rows, heads, head_dim] turned by `cos_sin` [rows, 2, head_dim / 2]; computed in fp32."""
    x1, x2 = x.chunk(2, dim=-1)
    cos, sin = cos_sin[:, 0, None], cos_sin[:, 1, None]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)
