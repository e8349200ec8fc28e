"""Feature maps without parameters, with a division by the sum or the length of each vector, as one operation.

The definition is PyTorch's own operators; a compiled kernel (`cpu/features.h`, `cuda/features.cu`) does all of them in
one pass, and the backward pass, which maps again, in another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_fastweights.ops import native_operators
from fairseq_fastweights.ops.checks import check_devices, check_tensor, state_dtype
from fairseq_fastweights.ops.choice import choose_elementwise
from fairseq_fastweights.ops.native_operators import register_autograd

Normalization = Literal["none", "sum", "length"]
NORMALIZATIONS = ("none", "sum", "length")
"""In the order of the kernels' numbers for them."""


def _elu(x: Tensor, nu: int) -> Tensor:
    # Not F.elu(x) + 1: expm1(x) + 1 rounds to 0 below x = -17 in float32; the map would vanish.
    return F.relu(x) + x.clamp(max=0).exp()


def _dpfp(x: Tensor, nu: int) -> Tensor:
    z = F.relu(torch.cat([x, -x], dim=-1))
    # Every rotation is a view of this: the backward pass keeps z about twice, not nu + 1 times.
    padded = torch.cat([z[..., -nu:], z], dim=-1)
    size = z.shape[-1]
    blocks = [z * padded.narrow(-1, nu - j, size) for j in range(1, nu + 1)]
    return blocks[0] if nu == 1 else torch.cat(blocks, dim=-1)


MAPS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "identity": lambda x, nu: x,
    "elu": _elu,
    "relu": lambda x, nu: F.relu(x),
    "dpfp": _dpfp,
}
"""By their names, in the order of the kernels' numbers for them."""


def map_features(
    x: Tensor,
    feature_map: str = "identity",
    *,
    nu: int = 1,
    normalization: Normalization = "none",
    eps: float = 0.0,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """Maps each vector of queries or keys, and divides it by its sum or its length.

    `feature_map` is "identity", "elu" for ELU(x) + 1 (Katharopoulos et al. 2020), "relu" or "dpfp" (Schlag et al. 2021,
    Eq. 37, in the order of the listing in its App. C, which `feature_maps.DpfpMap` gives). The map's y becomes
    scale * y, scale * y / (sum(y) + eps) for the normalization "sum" (Eq. 29 there), which leaves a sum that has
    underflowed out, or scale * y / sqrt(sum(y^2) + eps) for "length".

    Args:
        x: (batch, time, heads, dim).
        feature_map: a key of `MAPS`.
        nu: how many rotations "dpfp" multiplies, from 1 to 2 dim - 1.
        normalization: "none", "sum" or "length".
        eps: what is added to the sum, or under the root.
        scale: what the result is multiplied by.
        dtype: of the result; None for float32, and float64 for inputs in float64, in which all is computed.
        backend: as of the update rules: "auto", "reference", "chunkwise" (the same as "reference") or "native", which
            has no forward-mode derivatives and no second ones; "auto" takes "reference" for the former.

    Returns:
        (batch, time, heads, dim), or for "dpfp" (batch, time, heads, 2 dim nu).

    Raises:
        ValueError: for an argument that is not as above.
        BackendUnavailable: if backend is "native" and there are no kernels.

    Examples:
        >>> map_features(torch.tensor([1.0, 2.0]).view(1, 1, 1, 2), "dpfp").flatten()  # z = [1, 2, 0, 0]
        tensor([0., 2., 0., 0.])
        >>> map_features(torch.tensor([1.0, 3.0]).view(1, 1, 1, 2), normalization="sum").flatten()
        tensor([0.2500, 0.7500])
    """
    check_tensor("x", x)
    if x.dim() != 4:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be (batch, time, heads, dim)")
    if feature_map not in MAPS:
        raise ValueError(f"feature_map is {feature_map!r}; it must be one of {', '.join(MAPS)}")
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization is {normalization!r}; it must be one of {', '.join(NORMALIZATIONS)}")
    if feature_map == "dpfp" and not 1 <= nu < 2 * x.shape[-1]:
        raise ValueError(f"nu is {nu}; it must be from 1 to {2 * x.shape[-1] - 1} for vectors of {x.shape[-1]}")
    dtype = state_dtype(x.dtype) if dtype is None else dtype
    if choose_elementwise(backend, x) != "native":
        return _reference(x, feature_map, nu, normalization, eps, scale).to(dtype)
    x = x if x.stride(-1) == 1 else x.contiguous()
    numbers = list(MAPS).index(feature_map), nu, NORMALIZATIONS.index(normalization)
    mapped: Tensor = native_operators.map_features(x, *numbers, eps, scale, dtype)
    return mapped


def _reference(x: Tensor, feature_map: str, nu: int, normalization: str, eps: float, scale: float) -> Tensor:
    y = _normalized(MAPS[feature_map](x.to(state_dtype(x.dtype)), nu), normalization, eps)
    return y if scale == 1 else y * scale


def _normalized(y: Tensor, normalization: str, eps: float) -> Tensor:
    if normalization == "sum":
        total = y.sum(-1, keepdim=True) + eps
        y = y / torch.where(total.abs() < torch.finfo(y.dtype).tiny, 1.0, total)
    if normalization == "length":
        y = y * torch.rsqrt(y.square().sum(-1, keepdim=True) + eps)
    return y


def random_features(
    projected: Tensor,
    source: Tensor,
    *,
    scale: float = 1.0,
    log_epsilon: float = -math.inf,
    stabilized: bool = False,
    normalization: Normalization = "none",
    eps: float = 0.0,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """The random features of FAVOR+, with a division by the sum or the length of each vector.

    With l = [s + projected, s - projected], s = -(|scale * source|^2 + log(2 features)) / 2, they are exp(l) +
    exp(log_epsilon) (Choromanski et al. 2021), divided by a vector's largest exponential if `stabilized`: through that
    no gradient flows, as a normalisation divides it out again.

    Args:
        projected: (batch, time, heads, features), the products of scale * source with the random features.
        source: (batch, time, heads, dim).
        scale: what `source` is multiplied by.
        log_epsilon: the logarithm of what is added to each feature.
        stabilized: whether vectors are divided by their largest exponential, that of `log_epsilon` counted.
        normalization: "none", "sum" or "length", as of `map_features`, as are the arguments that follow.
        eps: what is added to the sum, or under the root.
        dtype: of the result.
        backend: "native" has second derivatives, those of the definition.

    Returns:
        (batch, time, heads, 2 features).

    Raises:
        ValueError: for an argument that is not as above.
        BackendUnavailable: if backend is "native" and there are no kernels.

    Examples:
        >>> x = torch.zeros(1, 1, 1, 3)
        >>> random_features(x, x, normalization="sum").flatten()
        tensor([0.1667, 0.1667, 0.1667, 0.1667, 0.1667, 0.1667])
    """
    check_tensor("projected", projected)
    if projected.dim() != 4 or source.shape[:-1] != projected.shape[:-1]:
        raise ValueError(
            f"projected has shape {tuple(projected.shape)} and source {tuple(source.shape)}; they must be (batch, "
            "time, heads, features) and (batch, time, heads, dim)"
        )
    check_devices({"source": source}, "projected", projected)
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization is {normalization!r}; it must be one of {', '.join(NORMALIZATIONS)}")
    dtype = state_dtype(projected.dtype) if dtype is None else dtype
    how = scale, log_epsilon, stabilized, NORMALIZATIONS.index(normalization), eps, dtype
    if choose_elementwise(backend, source) != "native":
        return _definition_of_random(projected, source, *how)
    projected, source = (x if x.stride(-1) == 1 else x.contiguous() for x in (projected, source))
    mapped: Tensor = _random_features(projected, source, *how)
    return mapped


def random_exponents(projected: Tensor, source: Tensor, scale: float) -> Tensor:
    """The logarithms of random features, l of `random_features`."""
    log_scale = -0.5 * ((source * scale).square().sum(-1, keepdim=True) + math.log(2 * projected.shape[-1]))
    # One exponential of the sum: exp(projected) alone overflows where its product with exp(log_scale) does not.
    return torch.cat([log_scale + projected, log_scale - projected], dim=-1)


def divided_by_largest(exponents: Tensor, log_epsilon: float, over: tuple[int, ...]) -> Tensor:
    """exp(exponents) + exp(log_epsilon), divided by the largest exponential over the dimensions `over`."""
    # Whatever divides a factor out takes its gradient out too: hence detach().
    largest = exponents.detach().amax(dim=over, keepdim=True)
    if math.isinf(log_epsilon):
        return (exponents - largest).exp()
    largest = largest.clamp(min=log_epsilon)
    return (exponents - largest).exp() + (log_epsilon - largest).exp()


def _exponentials(exponents: Tensor, log_epsilon: float, stabilized: bool) -> Tensor:
    return divided_by_largest(exponents, log_epsilon, (-1,)) if stabilized else exponents.exp() + math.exp(log_epsilon)


def _definition_of_random(
    projected: Tensor,
    source: Tensor,
    scale: float,
    log_epsilon: float,
    stabilized: bool,
    normalization: int,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    precise = state_dtype(projected.dtype)
    exponents = random_exponents(projected.to(precise), source.to(precise), scale)
    return _normalized(_exponentials(exponents, log_epsilon, stabilized), NORMALIZATIONS[normalization], eps).to(dtype)


_random_features = register_autograd("random_features", 2, 2, _definition_of_random)
