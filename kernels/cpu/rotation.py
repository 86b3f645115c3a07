"""An orthogonal change of the residual's basis that leaves a model's function as it is.

Activations of trained models have a few large channels, which an 8-bit scale per row would spend
its steps on. In a rotated basis they are spread over all channels. RMS norms do not see a rotation
once their gains are folded into the matrices that follow, so it costs nothing at run time.
(QuaRot, Ashkboos et al., 2024.)
"""

import torch
from torch import Tensor


def rotation(size: int) -> Tensor:
    """Orthogonal [size, size] fp64: Hadamard of the largest power of two, times a fixed random one
    for the odd rest.
    """
    odd = size
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while odd % 2 == 0:
        hadamard = torch.cat(
            (torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1))
        )
        odd //= 2
    noise = torch.randn(odd, odd, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rest, _ = torch.linalg.qr(noise)
    return torch.kron(hadamard / hadamard.shape[0] ** 0.5, rest.contiguous())
