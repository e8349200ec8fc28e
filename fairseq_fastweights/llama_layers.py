"""RMS norms and SwiGLU feed-forward networks, as in Llama."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

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


def use_rms_norms(module: nn.Module, eps: float) -> None:
    """Replaces a module's own layer norms, not those of its submodules, by RMS norms (Zhang and Sennrich 2019)."""
    for name, norm in list(module.named_children()):
        if name.endswith(_NORMS) and norm is not None:
            setattr(module, name, nn.RMSNorm(norm.normalized_shape, eps=eps))


def _same(x: Tensor) -> Tensor:
    return x
