"""DeltaNet: a memory that corrects and never forgets, behind a short convolution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_fastweights import ops
from fairseq_fastweights.mixers.children import are_plain
from fairseq_fastweights.mixers.gated_delta import GatedDelta
from fairseq_fastweights.mixers.mixer import Option
from fairseq_fastweights.mixers.update_rules import known_to_lose_when_carried


class DeltaNet(GatedDelta):
    """DeltaNet as Yang et al. (2024) train it, in the form of flash-linear-attention: Gated DeltaNet without decays.

        y = delta_rule(q, k, v, beta)                         `ops.delta_rule`
        out = W_o (w * y / rms(y))                            times silu(W_g x) with `gate`; the norm in each head

    q, k, v and beta are those of `GatedDelta`, and so is the state. The layer of Schlag et al. (2021), with a feature
    map and sum normalisation, is `FastWeightAttention` with the rule "delta".

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of heads of values.
        gate: whether what is read is gated.
        **others: `key_heads`, `key_dim`, `value_dim`, `conv`, `negative_eigenvalues`, `eps`, `kv_heads` and `backend`,
            which `GatedDelta` describes.

    Raises:
        ValueError: if an argument is not allowed; the message names it, its value and what is allowed.

    Examples:
        >>> out, state = DeltaNet(16, 4)(torch.randn(7, 3, 16))
        >>> out.shape, state["memory"].shape
        (torch.Size([7, 3, 16]), torch.Size([3, 4, 4, 4]))
    """

    options = {
        **{name: option for name, option in GatedDelta.options.items() if name not in ("bias", "gate_rank")},
        "gate": Option(bool, False, "gate what is read, as Gated DeltaNet"),
    }

    takes_attention = False

    def __init__(self, embed_dim: int, num_heads: int = 1, *, gate: bool = False, **others: Any) -> None:
        self.gate = gate
        super().__init__(embed_dim, num_heads, **others)

    def _make_gates(self, values: int) -> None:
        if self.gate:
            self.g_proj = nn.Linear(self.embed_dim, values, bias=self.bias)

    @torch.no_grad()
    def reset_special_parameters(self) -> None:
        """Sets the norm to 1."""
        self.o_norm.weight.fill_(1)

    @property
    def _gate_projections(self) -> list[Any]:
        return [self.g_proj] if self.gate else []

    def _log_gate(self, projected: list[Tensor], beta: Tensor) -> Tensor:
        return beta.new_zeros(()).expand(beta.shape)

    def concern_when_carried(self) -> str | None:
        """Returns a reason not to carry states from segment to segment in training."""
        return known_to_lose_when_carried("delta")

    def _remember(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_gate: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        if self.negative_eigenvalues:  # the delta rule has no write strengths of more than 1
            return super()._remember(q, k, v, beta, log_gate, **options)
        return ops.delta_rule(q, k, v, beta, **options)

    def _read(self, y: Tensor, projected: list[Tensor], dtype: torch.dtype) -> Tensor:
        if self.gate:
            return super()._read(y, projected, dtype)
        if are_plain([self.o_norm], nn.RMSNorm):
            precise = ops.state_dtype(y.dtype)
            y = F.rms_norm(y.to(precise), (self.value_dim,), self.o_norm.weight.to(precise), self.eps)
        else:
            y = self.o_norm(y)
        return y.flatten(-2).to(dtype)
