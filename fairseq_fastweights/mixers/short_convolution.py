"""The short causal convolution of each channel that several mixers have before their memory, with its SiLU.

The definition is PyTorch's own operators; a compiled kernel (`cpu/convolution.h`, `cuda/convolution.cu`) does all of
them in one pass, and the backward pass in another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_fastweights import ops
from fairseq_fastweights.mixers.mixer import are_plain, within_documents
from fairseq_fastweights.ops.backends import AUTOMATIC
from fairseq_fastweights.ops.checks import check_devices
from fairseq_fastweights.ops.kernels import differentiable, takes

WIDEST = 90
"""The widest convolution that the CUDA kernels take on every GPU, in every dtype: its inputs lie in shared memory."""


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    before: Tensor | None,
    lengths: Tensor | None,
    starts: Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """silu(sum_i w_i * x_{t-i} + b), and the inputs that the next call needs.

    Args:
        x: (time, batch, channels).
        weight: (channels, width), the weight of the last input last, as `torch.nn.Conv1d` has it.
        bias: (channels,); None for 0.
        before: (batch, width - 1, channels), the inputs that the last call returned; None at the beginning of a text.
        lengths: (batch,), the lengths of rows, which padding follows; None for no padding.
        starts: (batch, time), true where a document begins, which sees nothing of the text before it; None for nowhere.
        backend: one of `ops.BACKENDS`; "native" has second derivatives, those of the definition.

    Returns:
        (time, batch, channels) in the dtype of x, and the last inputs, (batch, width - 1, channels), in the dtype of
        states.
    """
    too_wide = backend in AUTOMATIC and x.is_cuda and weight.shape[1] > WIDEST
    if too_wide or not takes(backend, x, when_compiling=True):
        return _definition(x, weight, bias, before, lengths, starts)
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    before = before if before is None or before.stride(-1) == 1 else before.contiguous()
    y, last = _short_convolution(x, weight, bias, before, lengths, starts)
    return y, last


def convolve(
    conv: Any,
    width: int,
    x: Tensor,
    before: Tensor | None,
    lengths: Tensor | None,
    starts: Tensor | None,
    *,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """`short_convolution` by a layer.

    Args:
        conv: a module that is, or replaces, `nn.Conv1d(channels, channels, width, groups=channels, padding=width - 1)`.
        width: of its kernel.
        x, before, lengths, starts, backend: as of `short_convolution`, as are the results.
    """
    if are_plain([conv], nn.Conv1d):
        return short_convolution(x, conv.weight[:, 0], conv.bias, before, lengths, starts, backend=backend)
    time, batch, channels = x.shape
    reach = width - 1
    # The next call needs inputs, whatever the weights.
    _, last = short_convolution(x, x.new_zeros(channels, width), None, before, lengths, starts, backend=backend)
    # Documents stand apart, by zeros as far as the layer reaches back.
    number = torch.zeros(batch, time, dtype=torch.long, device=x.device) if starts is None else starts.cumsum(1)
    most = 0 if starts is None else max(starts.sum(1).tolist(), default=0)
    places = (torch.arange(reach, reach + time, device=x.device) + reach * number).t()[..., None].expand(x.shape)
    first = x.new_zeros(reach, batch, channels) if before is None else before.transpose(0, 1).to(x.dtype)
    inputs = torch.cat([first, x.new_zeros(time + reach * most, batch, channels)]).scatter(0, places, x)
    u = conv(inputs.permute(1, 2, 0)).permute(2, 0, 1).gather(0, places)
    return F.silu(u).to(x.dtype), last


def _definition(
    x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, lengths: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    # The kernels look at this themselves.
    given = {"weight": weight, "bias": bias, "before": before, "lengths": lengths, "starts": starts}
    check_devices({name: tensor for name, tensor in given.items() if tensor is not None}, "x", x)
    time, batch, channels = x.shape
    reach = weight.shape[1] - 1
    precise = ops.state_dtype(x.dtype)
    first = x.new_zeros(reach, batch, channels) if before is None else before.transpose(0, 1)
    inputs = torch.cat([first.to(precise), x.to(precise)])
    u = x.new_zeros(channels, dtype=precise) if bias is None else bias.to(precise)
    if starts is not None:  # of a document that goes on, all inputs before it count
        length = time if lengths is None else lengths
        seen, own = within_documents(starts, torch.arange(time, device=x.device)[None], length, reach)
    # Sums of products of shifted inputs: channels stay side by side, as the projections have them.
    for i, of_one in enumerate(weight.to(precise).unbind(1)):
        shifted = inputs[i : i + time]
        if starts is not None:
            shifted = torch.where((seen >= reach - i).t()[..., None], shifted, 0)
        u = torch.addcmul(u, shifted, of_one)
    if lengths is None:
        last = inputs[time:]
    else:
        places = lengths + torch.arange(reach, device=x.device)[:, None]
        last = inputs.gather(0, places[..., None].expand(reach, batch, channels))
    if starts is not None:
        last = torch.where((torch.arange(reach, 0, -1, device=x.device)[:, None] <= own)[..., None], last, 0)
    # A copy also where it lies in one piece: a state must not keep the text's tensor alive.
    return F.silu(u).to(x.dtype), last.transpose(0, 1).clone(memory_format=torch.contiguous_format)


_short_convolution = differentiable("short_convolution", _definition)
