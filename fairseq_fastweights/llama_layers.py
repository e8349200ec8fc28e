"""RMS norms and SwiGLU feed-forward networks, as in Llama."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_fastweights.invalid_input import check_number
from fairseq_fastweights.ops.gating import gate

_NORMS = ("layer_norm", "layernorm", "_ln", "layernorm_embedding")


class GatedLinear(nn.Module):
    """silu(W_g x) * W x: the first half of a SwiGLU network (Shazeer 2020)."""

    def __init__(self, dim: int, inner_dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, inner_dim, bias=False)
        self.linear = nn.Linear(dim, inner_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        return gate(logits, "silu", y=self.linear(x), dtype=logits.dtype)


def use_swiglu(layer: Any) -> None:
    """Replaces the feed-forward network of one of fairseq's layers by a SwiGLU network without biases."""
    inner_dim, dim = layer.fc1.out_features, layer.fc1.in_features
    layer.fc1, layer.fc2 = GatedLinear(dim, inner_dim), nn.Linear(inner_dim, dim, bias=False)
    layer.activation_fn = _same  # the gate has it


class ZeroCenteredRMSNorm(nn.RMSNorm):
    """(1 + w) x / rms(x), whose w starts at 0, as in Qwen3-Next; computed in float32 at least."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        precise = torch.promote_types(x.dtype, torch.float32)
        weight = 1 + self.weight.to(precise)
        return F.rms_norm(x.to(precise), self.normalized_shape, weight, self.eps).to(x.dtype)


def rms_norm(shape: Any, eps: float, zero_centered: bool = False) -> nn.RMSNorm:
    """An RMS norm (Zhang and Sennrich 2019) of the last dimensions, or a `ZeroCenteredRMSNorm`."""
    check_number("eps", eps, 0)
    return (ZeroCenteredRMSNorm if zero_centered else nn.RMSNorm)(shape, eps=eps)


def use_rms_norms(module: nn.Module, eps: float, zero_centered: bool = False) -> None:
    """Replaces a module's own layer norms, not those of its submodules, by RMS norms."""
    for name, norm in list(module.named_children()):
        if name.endswith(_NORMS) and norm is not None:
            setattr(module, name, rms_norm(norm.normalized_shape, eps, zero_centered))


def _same(x: Tensor) -> Tensor:
    return x
