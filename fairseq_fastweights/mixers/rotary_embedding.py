"""Rotary position embeddings (Su et al. 2021): products of rotated vectors depend on their distance alone."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_fastweights.invalid_input import InvalidInput, check_number

_NUMBER = r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)"  # as Python and C write them
_LINEAR = re.compile(f"linear:{_NUMBER}")
_LLAMA3 = re.compile(f"llama3:{_NUMBER},{_NUMBER},{_NUMBER},{_NUMBER}")


@dataclass(frozen=True)
class RotaryScaling:
    """Lower frequencies for a model that was trained on shorter texts.

    Wavelengths of at most positions / high stay, those of at least positions / low are multiplied by `factor`, and
    those between by a number between ("llama3"). With infinite `low` and `high` all are multiplied by `factor`
    ("linear", Chen et al. 2023).
    """

    factor: float
    low: float = math.inf
    high: float = math.inf
    positions: float = 1

    def __call__(self, frequencies: Tensor) -> Tensor:
        if math.isinf(self.low):
            return frequencies / self.factor
        waves = self.positions * frequencies / (2 * math.pi)  # in as many positions
        kept = ((waves - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


def parse_scaling(text: str) -> RotaryScaling | None:
    """Reads "linear:FACTOR" or "llama3:FACTOR,LOW,HIGH,POSITIONS"; empty for none.

    Raises:
        ValueError: for anything else.

    Examples:
        >>> parse_scaling("llama3:32,1,4,8192").factor
        32.0
    """
    if not text:
        return None
    match = _LINEAR.fullmatch(text) or _LLAMA3.fullmatch(text)
    numbers = [] if match is None else [float(number) for number in match.groups()]
    if numbers and all(map(math.isfinite, numbers)):
        scaling = RotaryScaling(*numbers)
        if scaling.factor and scaling.positions and (math.isinf(scaling.low) or scaling.low < scaling.high):
            return scaling
    raise InvalidInput(
        f"rotary_scaling is {text!r}; it must be linear:FACTOR or llama3:FACTOR,LOW,HIGH,POSITIONS, of positive "
        "numbers, LOW less than HIGH, as in llama3:32,1,4,8192"
    )


class RotaryEmbedding:
    """The rotation of a layer's queries and keys.

    Args:
        dim: number of dimensions of each head that are rotated, from the first: even, 0 for none.
        base: that of `turns`.
        scaling: a text for `parse_scaling`.
        head_dim: size of the heads.

    Raises:
        ValueError: for a number or text that is not allowed; the message calls them rotary_dim, rotary_base and
            rotary_scaling.
    """

    def __init__(self, dim: int, base: float, scaling: str, head_dim: int) -> None:
        if dim % 2 or not 0 <= dim <= head_dim:
            raise InvalidInput(
                f"rotary_dim is {dim}; it must be an even number from 2 to the head dim, {head_dim}, or 0 for none"
            )
        check_number("rotary_base", base, above=0)
        self.dim, self.base, self.text = dim, float(base), scaling
        self._scaling = parse_scaling(scaling)

    def turns(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines for `rotate`, with angles in float32."""
        return turns(positions.float(), self.dim, self.base, dtype, self._scaling)

    def settings(self) -> dict[str, float | str]:
        """The settings that checkpoints record; none without a rotation."""
        scaling = {"rotary scaling": self.text} if self.text else {}
        return {"rotary dim": self.dim, "rotary base": self.base, **scaling} if self.dim else {}


def turns(
    positions: Tensor, dim: int, base: float, dtype: torch.dtype, scaling: RotaryScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles by which vectors at these positions are rotated.

    Args:
        positions: (...), in the dtype in which angles are computed; bfloat16 cannot tell position 300 from 301.
        dim: number of dimensions that are rotated, even.
        base: the slowest pair of dimensions rotates once in about 2 pi x base positions.
        dtype: of the result.
        scaling: changes the frequencies; None for no change.

    Returns:
        (..., dim / 2) each.
    """
    # theta_i = base^(-2 i / dim) in plane i.
    exponents = torch.arange(0, dim, 2, device=positions.device, dtype=positions.dtype) / dim
    frequencies = 1.0 / base**exponents
    angles = positions[..., None] * (frequencies if scaling is None else scaling(frequencies))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotates x, (..., dim), in the planes of its dimensions i and i + n / 2, where n is the `dim` of `turns`."""
    half = cosines.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines, rest], dim=-1)
