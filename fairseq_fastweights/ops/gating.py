"""Gates, and what they multiply, which may be normed, as one operation.

The definition is PyTorch's own operators; a compiled kernel (`cpu/gating.h`, `cuda/gating.cu`) does all of them in one
pass, and the backward pass, which computes the gates again, in another.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_fastweights.ops.checks import check_devices, check_shape, check_tensor, state_dtype
from fairseq_fastweights.ops.choice import choose_elementwise
from fairseq_fastweights.ops.native_operators import register_autograd

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
    """scale * activation(x + bias), times -exp(log_rate) if that is given, and times y, or what a norm makes of it.

    With softplus and a log rate these are the logarithms of Mamba's and Gated DeltaNet's decays. With y it is a gated
    read-out, whose norm is of each head, "rms" for weight * y / sqrt(mean(y^2) + eps) or "layer" for weight *
    (y - mean(y)) / sqrt(variance(y) + eps); and without a norm the gate of Mamba and of SwiGLU networks.

    Args:
        x: (..., channels).
        activation: a key of `ACTIVATIONS`.
        bias: (channels,); None for 0. Not with a norm.
        log_rate: (rates,), each for channels / rates channels in turn; None for no factor. Not with a norm.
        y: as x, or with a norm (..., heads, dim), heads * dim = channels; None for no factor.
        weight: (dim,), of the norm; None for 1.
        norm: one of `NORMS`.
        eps: what the norm adds under its root.
        scale: what the result is multiplied by.
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
    dtype = state_dtype(x.dtype) if dtype is None else dtype
    if backend == "auto" and not torch.compiler.is_compiling():
        form, precise = _form(x, bias, log_rate, y, norm, scale, dtype), x.dtype in _PRECISE
        few = x.is_cpu and x.numel() < FASTER_FROM[form][not precise]
        if form == "plain" and (few or (y is None and precise)):
            if y is None:
                return ACTIVATIONS[activation](x)
            check_devices({"y": y}, "x", x)
            return y * ACTIVATIONS[activation](x)
        backend = "reference" if few else backend
        if x.is_cuda and norm != "none" and y is not None and y.shape[-1] > most_normed(x.dtype):
            backend = "reference"
    numbers = _NUMBERS[activation], _NUMBERS[norm]
    if choose_elementwise(backend, x) != "native":
        return _definition(x, bias, log_rate, y, weight, *numbers, eps, scale, dtype)
    shape, of_y = x.shape, 0 if norm == "none" else 1
    x, y = _in_steps(x, 3), None if y is None else _in_steps(y, 3 + of_y)
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


def _definition(
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
    logits = x.to(precise) if bias is None else x.to(precise) + bias.to(precise)
    out = list(ACTIVATIONS.values())[activation](logits)
    if log_rate is not None:
        rates = -log_rate.to(precise).exp()
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


_gate = register_autograd("gate", 5, 5, _definition)
