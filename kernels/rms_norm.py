"""Root mean square layer normalisation (Zhang and Sennrich, 2019).

y = x / sqrt(mean(x^2) + eps) * weight        x [rows, hidden], weight [hidden]
"""

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula in fp32, result in the dtype of `weight`."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(weight.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` and `weight` fp32 -> fp32."""
    return F.rms_norm(x, weight.shape, weight, eps)
