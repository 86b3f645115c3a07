"""Soft capping of scores and logits, which bends them below a limit (Bello et al., 2016).

y = cap * tanh(x / cap)        any shape; cap 0 = as they are
"""

from torch import Tensor


def softcap(x: Tensor, cap: float) -> Tensor:
    return (x / cap).tanh_().mul_(cap) if cap else x
