"""Operations on single numbers or single vectors: feature maps, their normalisations, gates, and gated norms.

Each has a definition of PyTorch's own operators and a compiled kernel (`features` and `gating` in `cpu/` and `cuda/`),
which does all in one pass; the backward pass computes the map or the gates again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_fastweights.ops import backends, kernels
from fairseq_fastweights.ops.checks import check_devices, check_shape, check_tensor, state_dtype
from fairseq_fastweights.ops.kernels import differentiable, takes

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
    # Block j: z_i z_{i-j}, indices modulo 2 dim (Schlag et al. 2021, App. C).
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
_MAP_NUMBERS = {name: number for number, name in enumerate(MAPS)}
_NORMALIZATION_NUMBERS = {name: number for number, name in enumerate(NORMALIZATIONS)}


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
        eps: added to the sum, or under the root.
        scale: a factor of the result.
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
    return apply_map(x, feature_map, nu, normalization, eps, scale, dtype, backend)


def apply_map(
    x: Tensor,
    feature_map: str = "identity",
    nu: int = 1,
    normalization: Normalization = "none",
    eps: float = 0.0,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """`map_features` for a layer, whose arguments need no checks."""
    if dtype is None:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if not takes(backend, x):
        return _reference(x, feature_map, nu, normalization, eps, scale).to(dtype)
    # Kernels read vectors of any layout whose numbers lie side by side.
    x = x if x.stride(-1) == 1 else x.contiguous()
    mapped: Tensor = kernels.map_features(
        x, _MAP_NUMBERS[feature_map], nu, _NORMALIZATION_NUMBERS[normalization], eps, scale, dtype
    )
    return mapped


def _reference(x: Tensor, feature_map: str, nu: int, normalization: str, eps: float, scale: float) -> Tensor:
    y = _normalized(MAPS[feature_map](x.to(state_dtype(x.dtype)), nu), normalization, eps)
    return y if scale == 1 else y * scale


def _normalized(y: Tensor, normalization: str, eps: float) -> Tensor:
    if normalization == "sum":
        total = y.sum(-1, keepdim=True) + eps
        # A sum that underflowed would divide 0 by 0: the vector stays as it is.
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
        scale: a factor of `source`.
        log_epsilon: the logarithm of a number that is added to each feature.
        stabilized: whether vectors are divided by their largest exponential, that of `log_epsilon` counted.
        normalization: "none", "sum" or "length", as of `map_features`, as are the arguments that follow.
        eps: added to the sum, or under the root.
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
    if not takes(backend, source):
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
    # The added epsilon is scaled alike, so that it may be the largest term itself.
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
    # l = [s + R x, s - R x], s = -(|x|^2 + log 2m) / 2.
    precise = state_dtype(projected.dtype)
    exponents = random_exponents(projected.to(precise), source.to(precise), scale)
    return _normalized(_exponentials(exponents, log_epsilon, stabilized), NORMALIZATIONS[normalization], eps).to(dtype)


_random_features = differentiable("random_features", _definition_of_random)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "log_sigmoid": F.logsigmoid,
    "softplus": F.softplus,
}
"""By their names, in the order of the kernels' numbers for them."""
NORMS = ("none", "rms", "layer")
"""In the order of the kernels' numbers for them."""
NEVER = 2**63
FASTER_FROM = {
    "plain": (NEVER, NEVER),
    "activation": (NEVER, 2**20),
    "bias": (2**16, 2**15),
    "factor": (NEVER, 2**15),
    "rate": (0, 0),
    "rms": (0, 0),
    "layer": (2**16, 0),
}
"""From how many numbers on a kernel is faster on a CPU than the definition, forwards and backwards together: in float32
and float64, and in 16 bits, which PyTorch's operators first convert. Measured with one thread.

"plain" is an activation, or its product with y, where all are of one dtype: one or two operators of PyTorch, which take
16 bits as they are. The product then rounds twice, and is faster than a kernel at every size."""
_PRECISE = (torch.float32, torch.float64)
# Kernels know activations and norms by their places.
_NUMBERS = {name: number for names in (ACTIVATIONS, NORMS) for number, name in enumerate(names)}


def gate(
    x: Tensor,
    activation: str,
    *,
    bias: Tensor | None = None,
    log_rate: Tensor | None = None,
    y: Tensor | None = None,
    weight: Tensor | None = None,
    norm: str = "none",
    eps: float = 0.0,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """scale * activation(x + bias), times -exp(log_rate) if that is given, and times y or its norm.

    With softplus and a log rate these are the logarithms of Mamba's and Gated DeltaNet's decays. With y it is a gated
    output, whose norm is of each head, "rms" for weight * y / sqrt(mean(y^2) + eps) or "layer" for weight *
    (y - mean(y)) / sqrt(variance(y) + eps); and without a norm the gate of Mamba and of SwiGLU networks.

    Args:
        x: (..., channels).
        activation: a key of `ACTIVATIONS`.
        bias: (channels,); None for 0. Not with a norm.
        log_rate: (rates,), each for channels / rates channels in turn; None for no factor. Not with a norm.
        y: as x, or with a norm (..., heads, dim), heads * dim = channels; None for no factor.
        weight: (dim,), of the norm; None for 1.
        norm: one of `NORMS`.
        eps: added under the root of the norm.
        scale: a factor of the result.
        dtype: of the result; None for float32, and float64 for x in float64, in which all is computed.
        backend: as of `map_features`; "native" has second derivatives, those of the definition.

    Returns:
        (..., channels).

    Raises:
        ValueError: for an argument that is not as above.
        BackendUnavailable: if backend is "native" and there are no kernels.

    Examples:
        >>> gate(torch.zeros(2), "sigmoid", scale=2.0)
        tensor([1., 1.])
        >>> gate(torch.full((2,), 100.0), "sigmoid", y=torch.tensor([[3.0, -3.0]]), norm="rms")
        tensor([ 1., -1.])
    """
    _check(x, activation, bias, log_rate, y, weight, norm)
    return apply_gate(x, activation, bias, log_rate, y, weight, norm, eps, scale, dtype, backend)


def apply_gate(
    x: Tensor,
    activation: str,
    bias: Tensor | None = None,
    log_rate: Tensor | None = None,
    y: Tensor | None = None,
    weight: Tensor | None = None,
    norm: str = "none",
    eps: float = 0.0,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """`gate` for a layer, whose arguments need no checks."""
    if dtype is None:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if backend in backends.AUTOMATIC and not torch.compiler.is_compiling():
        # Where kernels and PyTorch both can, the faster one by form and size.
        form, precise = _form(x, bias, log_rate, y, norm, scale, dtype), x.dtype in _PRECISE
        few = x.is_cpu and x.numel() < FASTER_FROM[form][not precise]
        if form == "plain" and (few or (y is None and precise)):
            if y is None:
                return ACTIVATIONS[activation](x)
            check_devices({"y": y}, "x", x)
            return y * ACTIVATIONS[activation](x)
        backend = "reference" if few else backend
        # A GPU's kernel holds a vector in the registers of one block of threads.
        if x.is_cuda and norm != "none" and y is not None and y.shape[-1] > most_normed(x.dtype):
            backend = "reference"
    numbers = _NUMBERS[activation], _NUMBERS[norm]
    if not takes(backend, x):
        return _definition_of_gate(x, bias, log_rate, y, weight, *numbers, eps, scale, dtype)
    # Kernels take (time, batch, channels), and y with a norm as (time, batch, heads, dim).
    shape = x.shape
    if x.dim() != 3 or not x.is_contiguous():
        x = _in_steps(x, 3)
    if y is not None and (norm == "none" or y.dim() != 4 or not y.is_contiguous()):
        y = _in_steps(y, 3 if norm == "none" else 4)
    out: Tensor = _gate(x, bias, log_rate, y, weight, *numbers, eps, scale, dtype)
    return out if out.shape == shape else out.view(shape)


def most_normed(dtype: torch.dtype) -> int:
    """The longest vector that the CUDA kernels norm: 256 threads have 16 bytes of it each, or a number in float64."""
    return 256 if dtype == torch.float64 else 4096 // dtype.itemsize


def _form(
    x: Tensor,
    bias: Tensor | None,
    log_rate: Tensor | None,
    y: Tensor | None,
    norm: str,
    scale: float,
    dtype: torch.dtype,
) -> str:
    """The key of `FASTER_FROM` for a call."""
    if norm != "none":
        return norm
    if log_rate is not None:
        return "rate"
    if bias is None and scale == 1 and x.dtype == dtype and (y is None or y.dtype == dtype):
        return "plain"
    return "factor" if y is not None else "activation" if bias is None else "bias"


def _in_steps(x: Tensor, dims: int) -> Tensor:
    """x with so many dimensions, as the kernels take it."""
    if x.dim() < dims:
        x = x[(None,) * (dims - x.dim())]
    elif x.dim() > dims:
        x = x.flatten(0, x.dim() - dims)
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _definition_of_gate(
    x: Tensor,
    bias: Tensor | None,
    log_rate: Tensor | None,
    y: Tensor | None,
    weight: Tensor | None,
    activation: int,
    norm: int,
    eps: float,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    # The kernels look at this themselves.
    for name, tensor in (("bias", bias), ("log_rate", log_rate), ("y", y), ("weight", weight)):
        if tensor is not None and tensor.device != x.device:
            check_devices({name: tensor}, "x", x)
    precise = state_dtype(x.dtype)
    # In float32 at least, and rounded once at the end.
    logits = x.to(precise) if bias is None else x.to(precise) + bias.to(precise)
    out = list(ACTIVATIONS.values())[activation](logits)
    if log_rate is not None:
        rates = -log_rate.to(precise).exp()
        # log f = -exp(A_log) softplus(x + bias), a rate for each head.
        out = (out.unflatten(-1, (len(rates), -1)) * rates[:, None]).flatten(-2)
    if y is not None:
        y, w = y.to(precise), None if weight is None else weight.to(precise)
        if NORMS[norm] == "rms":
            y = F.rms_norm(y, y.shape[-1:], w, eps).flatten(-2)
        if NORMS[norm] == "layer":
            y = F.layer_norm(y, y.shape[-1:], w, None, eps).flatten(-2)
        out = y * out
    return (out if scale == 1 else out * scale).to(dtype)


def _check(
    x: Tensor,
    activation: str,
    bias: Tensor | None,
    log_rate: Tensor | None,
    y: Tensor | None,
    weight: Tensor | None,
    norm: str,
) -> None:
    check_tensor("x", x)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; it must be one of {', '.join(ACTIVATIONS)}")
    if norm not in NORMS:
        raise ValueError(f"norm is {norm!r}; it must be one of {', '.join(NORMS)}")
    shape = x.shape
    if not shape or shape[-1] < 1:
        raise ValueError(f"x has shape {tuple(shape)}; it must be (..., channels)")
    channels = shape[-1]
    if bias is not None:
        check_shape("bias", bias, (channels,), "(channels,) as x has them")
    if log_rate is not None and (log_rate.dim() != 1 or not len(log_rate) or channels % len(log_rate)):
        raise ValueError(
            f"log_rate has shape {tuple(log_rate.shape)}; it must be (rates,), of which the {channels} channels of x "
            "are a multiple"
        )
    if norm == "none":
        if weight is not None:
            raise ValueError("weight was given and norm is 'none'; it must be 'rms' or 'layer'")
        if y is not None:
            check_shape("y", y, shape, "that of x")
        return
    if y is None or bias is not None or log_rate is not None:
        raise ValueError(f"norm is {norm!r}; there must be y, and neither bias nor log_rate")
    if y.dim() != x.dim() + 1 or y.shape[-2:].numel() != channels:
        raise ValueError(f"y has shape {tuple(y.shape)}; it must be (..., heads, dim) for x of {tuple(x.shape)}")
    check_shape("y", y, (*x.shape[:-1], *y.shape[-2:]), "(..., heads, dim) as x has them")
    if weight is not None:
        check_shape("weight", weight, (y.shape[-1],), "(dim,) as y has it")


_gate = differentiable("gate", _definition_of_gate)
