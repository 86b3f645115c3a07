"""Rotary frequencies and their scalings for contexts longer than the first training's.

Every scaling known here is a divisor per pair, and a factor on the turned queries and keys:

    pair i at position p turns by p * base^(-2i / dims) / divisors[i]
"""

import math
from typing import Annotated, Self

import torch
from msgspec import Meta, Struct
from torch import Tensor

from kernels.rotary_embedding import rotary_table

_Positive = Annotated[float, Meta(gt=0)]


class RopeError(ValueError):
    """Parameters that describe no rotary embedding known here. `key` is the one at fault."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key = key
        self.reason = reason


class Rope(Struct, frozen=True, kw_only=True):
    """A rotary embedding of the first `dims` of a head; the others pass unturned."""

    base: float
    dims: int
    divisors: tuple[float, ...] = ()  # dims / 2 of them; none = all 1
    magnitude: float = 1.0

    def table(self, length: int) -> Tensor:
        """See `rotary_table`; exact angles, since frequencies are fp64."""
        return rotary_table(self._frequencies(), length) * self.magnitude

    def _frequencies(self) -> Tensor:
        pairs = torch.arange(0, self.dims, 2, dtype=torch.float64) / self.dims
        frequencies = self.base**-pairs
        if self.divisors:
            frequencies /= torch.tensor(self.divisors, dtype=torch.float64)
        return frequencies

    def scaled(self, scaling: "RopeScaling", context_length: int) -> Self:
        """The same under `scaling`, for a model of `context_length`. Raises `RopeError`."""
        try:
            found = self._scaled(scaling, context_length)
            numbers = (*found._frequencies().tolist(), found.magnitude)
        except RopeError:
            raise
        except (ArithmeticError, ValueError) as error:  # ValueError: the logarithm of 0
            raise RopeError("rope_type", f"{scaling.kind!r} gives no numbers: {error}") from error
        if not all(0 <= number < math.inf for number in numbers):
            raise RopeError("rope_type", f"{scaling.kind!r} gives frequencies that are not finite")
        return found

    def _scaled(self, scaling: "RopeScaling", context_length: int) -> Self:
        trained = scaling.original_max_position_embeddings or context_length
        match scaling.kind:
            case "default" | "dynamic":  # dynamic: unscaled within the length of the first training
                return self
            case "linear":
                return self._with((scaling.need("factor"),) * (self.dims // 2))
            case "llama3":
                return self._with(self._llama3(scaling, trained))
            case "yarn":
                return self._with(self._yarn(scaling, trained), scaling.yarn_magnitude())
            case "longrope":
                extension = scaling.factor or context_length / trained
                short = tuple(scaling.short_factor)
                if len(short) != self.dims // 2:
                    reason = f"{len(short)} factors for {self.dims // 2} pairs"
                    raise RopeError("short_factor", reason)
                return self._with(short, scaling.longrope_magnitude(extension, trained))
        known = "default, dynamic, linear, llama3, yarn, longrope"
        raise RopeError("rope_type", f"{scaling.kind!r} is not supported, only {known}")

    def _with(self, divisors: tuple[float, ...], magnitude: float = 1.0) -> Self:
        return type(self)(base=self.base, dims=self.dims, divisors=divisors, magnitude=magnitude)

    def _llama3(self, scaling: "RopeScaling", trained: int) -> tuple[float, ...]:
        """Slow pairs are divided, fast ones are not, those between are blended (Llama 3.1)."""
        low, high = scaling.need("low_freq_factor"), scaling.need("high_freq_factor")
        if high <= low:
            raise RopeError("high_freq_factor", f"{high} is not above low_freq_factor {low}")
        turns = trained * self._frequencies() / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return _blended(kept, scaling.need("factor"))

    def _yarn(self, scaling: "RopeScaling", trained: int) -> tuple[float, ...]:
        """As llama3, but blended evenly over the pairs' numbers (Peng et al., 2023)."""

        def pair_of(turns: float) -> float:
            return self.dims * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(self.base))

        first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.dims - 1)
        width = last - first or 0.001
        pairs = torch.arange(self.dims // 2, dtype=torch.float64)
        return _blended(1 - ((pairs - first) / width).clamp(0, 1), scaling.need("factor"))


class RopeScaling(Struct, frozen=True, rename={"kind": "rope_type"}):
    """`rope_scaling` or `rope_parameters` of a config.json, under their names there."""

    kind: str = "default"
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: Annotated[int, Meta(gt=0, le=1 << 31)] | None = None
    attention_factor: float | None = None
    beta_fast: _Positive = 32.0
    beta_slow: _Positive = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: list[float] = []
    rope_theta: _Positive | None = None
    partial_rotary_factor: float = 1.0

    def need(self, key: str) -> float:
        value = getattr(self, key)
        if value is None or value <= 0:
            reason = "missing" if value is None else f"{value!r} is not positive"
            raise RopeError(key, reason)
        return float(value)

    def yarn_magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        growth = 0.1 * math.log(max(self.need("factor"), 1.0))
        if self.mscale and self.mscale_all_dim:
            return (growth * self.mscale + 1) / (growth * self.mscale_all_dim + 1)
        return growth + 1

    def longrope_magnitude(self, extension: float, trained: int) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(max(extension, 1.0)) / math.log(trained))


def _blended(kept: Tensor, factor: float) -> tuple[float, ...]:
    """Divisors of pairs of which the part `kept` keeps its frequency and the rest is divided."""
    return tuple((1 / (kept + (1 - kept) / factor)).tolist())
