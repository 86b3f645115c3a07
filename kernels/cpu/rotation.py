"""Orthogonal changes of basis that leave a model as it is (QuaRot, Ashkboos et al., 2024).

Activations of trained models have a few large channels, which an 8-bit scale per row would spend
its steps on. In a rotated basis they are spread over all channels. For the residual it costs
nothing at run time: RMS norms do not see a rotation once their gains are folded into the matrices
that follow. The input of `down`, behind a product, is turned in every step (`spread` of gemm.h).
"""

import torch
from torch import Tensor

LANES = 16  # of vector.h


def rotation(size: int) -> Tensor:
    """Orthogonal [size, size] fp64: Hadamard of the largest power of two, times a fixed random one
    for the odd rest.
    """
    power = size & -size
    odd = size // power
    noise = torch.randn(odd, odd, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rest, _ = torch.linalg.qr(noise)
    return torch.kron(_hadamard(power) / power**0.5, rest.contiguous())


def spread(weight: Tensor) -> Tensor:
    """`weight` [out, in] for an input that `spread` of gemm.h has been over; `in` is a multiple of
    its lanes.
    """
    columns = weight.shape[1]
    mixed = (columns & -columns) // LANES
    blocks = weight.reshape(len(weight), -1, mixed, LANES)
    return (_hadamard(mixed).to(weight.dtype) / mixed @ blocks).reshape(weight.shape)


def _hadamard(size: int) -> Tensor:
    """Of a power of two: +1 and -1, fp64, orthogonal but for its length."""
    found = torch.ones(1, 1, dtype=torch.float64)
    while len(found) < size:
        found = torch.cat((torch.cat((found, found), 1), torch.cat((found, -found), 1)))
    return found
