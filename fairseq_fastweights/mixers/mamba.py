"""Mamba: a diagonal state space model whose step sizes depend on the input."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_fastweights import ops
from fairseq_fastweights.mixers.mixer import Mixer, State, are_plain, beyond, in_rows, option
from fairseq_fastweights.mixers.short_convolution import convolve
from fairseq_fastweights.ops.chunkwise.chunks import are_apart
from fairseq_fastweights.ops.elementwise import apply_gate
from fairseq_fastweights.ops.scan import reference as step_by_step

FORGETS = 2.0**64
"""The size of a step that empties the state: exp(-FORGETS * rate) is 0."""


SMALLEST_STEP, LARGEST_STEP = 1e-3, 1e-1
"""The range of initial step sizes (Gu & Dao 2023, Sec. 3.6), whose logarithms are uniform, as in the authors' code."""


class Mamba(Mixer):
    """A selective state space between a short convolution and a gate (Gu & Dao 2023, Sec. 3.4 and Algorithm 2).

        x, z = W_in input                           `expansion` x embed_dim channels each
        u_t = silu(sum_i w_i * x_{t-i} + b)         the last `conv` inputs of each channel
        dt, B, C = W_x u                            dt of `dt_rank` numbers, B and C of `state` numbers
        delta = softplus(W_dt dt + b_dt)            the size of a channel's step
        h_t = exp(-delta_t exp(A_log)) * h_{t-1} + (delta_t * u_t) B_t^T out = W_out ((h_t C_t + D * u_t) * silu(z))

    Parameters have the names and shapes of Hugging Face's `MambaMixer` and of the authors' `Mamba`. StripedMamba (Choi
    2024, Sec. 4.1) has such layers in place of a Transformer's attention.

    The state holds "conv", (batch, conv - 1, channels), the inputs that the convolution still needs, and "scan",
    (batch, channels, state), in float32 (float64 for inputs in float64).

    Args:
        embed_dim: width of the input and of the output.
        state: size of each channel's state.
        conv: width of the convolution, in inputs.
        expansion: channels for each dimension of `embed_dim`.
        dt_rank: numbers from which the step sizes are computed; 0 for embed_dim / 16, rounded up.
        bias: whether the input and output projections have biases; with them it starts nearer to a trained attention.
        backend: of `ops.selective_scan`.
        batch_first: as in `Mixer`.

    Raises:
        ValueError: if an argument is not allowed; the message names it, its value and the allowed values.

    Examples:
        >>> out, state = Mamba(16)(torch.randn(7, 3, 16))  # (time, batch, embed_dim)
        >>> {name: tuple(x.shape) for name, x in state.items()}
        {'conv': (3, 3, 32), 'scan': (3, 32, 16)}
    """

    state: int = option(16, "dimension of the state of each channel of Mamba", least=1)
    conv: int = option(4, "width of the convolution of Mamba", least=1)
    expansion: int = option(2, "number of channels of Mamba per dimension of the input", least=1)
    dt_rank: int = option(0, "rank of Mamba's projection to step sizes; 0 is a sixteenth of the width", least=0)
    bias: bool = option(False, "biases of Mamba's projections, with which it starts nearer to a trained attention")

    unrecorded = ("bias",)
    takes_attention = True
    takes_starts = True
    padding_last = True

    def __init__(self, embed_dim: int, **options: Any) -> None:
        super().__init__(embed_dim, **self.take_options(options))
        state, conv, bias = self.state, self.conv, self.bias
        self.dt_rank = self.dt_rank or math.ceil(embed_dim / 16)
        self.channels = channels = self.expansion * embed_dim
        self.in_proj = nn.Linear(embed_dim, 2 * channels, bias=bias)
        self.conv1d = nn.Conv1d(channels, channels, conv, groups=channels, padding=conv - 1)
        self.x_proj = nn.Linear(channels, self.dt_rank + 2 * state, bias=False)
        self.dt_proj = nn.Linear(self.dt_rank, channels)
        self.A_log = nn.Parameter(torch.empty(channels, state))
        self.D = nn.Parameter(torch.empty(channels))
        self.out_proj = nn.Linear(channels, embed_dim, bias=bias)
        self.reset_special_parameters()

    @torch.no_grad()
    def reset_special_parameters(self) -> None:
        """Sets A = -(1 ... state) for each channel and D = 1, and draws the biases of step sizes (Sec. 3.6)."""
        # S4D-Real (Gu & Dao 2023, Sec. 3.6): A = -(1 ... state), kept as logarithms.
        rates = torch.arange(1, self.state + 1, dtype=torch.float32, device=self.A_log.device)
        self.A_log.copy_(rates.log().expand_as(self.A_log))
        self.D.fill_(1)
        nn.init.uniform_(self.dt_proj.weight, -(self.dt_rank**-0.5), self.dt_rank**-0.5)
        draw_step_biases_(self.dt_proj.bias)

    def mix(
        self, text: Tensor, state: State | None, lengths: Tensor | None, starts: Tensor | None, in_place: bool
    ) -> tuple[Tensor, State]:
        before = {} if state is None else state
        # (time, batch, channels)
        x, z = self.in_proj(text).chunk(2, dim=-1)
        u, conv_state = convolve(self.conv1d, self.conv, x, before.get("conv"), lengths, starts, backend=self.backend)
        # Step size, input and output projections follow from u: this makes the state space selective.
        dt, B, C = self.x_proj(in_rows(u)).split([self.dt_rank, self.state, self.state], dim=-1)
        # delta = softplus(W_dt dt + b_dt)
        if are_plain([self.dt_proj]):
            projected = F.linear(dt, self.dt_proj.weight)
            delta = apply_gate(projected, "softplus", bias=self.dt_proj.bias, backend=self.backend)
        else:
            delta = apply_gate(self.dt_proj(dt), "softplus", backend=self.backend)
        if lengths is not None:  # a step of no size leaves the state as it is
            delta = delta.masked_fill(beyond(len(text), lengths)[..., None], 0)
        # h_t = exp(-delta_t exp(A_log)) * h_{t-1} + (delta_t * u_t) B_t^T,  y_t = h_t C_t + D * u_t
        precise = ops.state_dtype(u.dtype)
        scan = ops.selective_scan if starts is None else partial(_scan_of_documents, starts)
        initial = before.get("scan")
        how: dict[str, Any] = {
            "initial_state": initial,
            "in_place": in_place and initial is not None,
            "backend": self.backend,
        }
        u, delta, B, C = (part.transpose(0, 1) for part in (u, delta, B, C))
        y, scan_state = scan(u, delta, -self.A_log.to(precise).exp(), B, C, self.D.to(precise), **how)
        out = apply_gate(z, "silu", y=y.transpose(0, 1), dtype=y.dtype, backend=self.backend)
        return self.out_proj(in_rows(out)), {"conv": conv_state, "scan": scan_state}


def _scan_of_documents(
    starts: Tensor, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """`ops.selective_scan` of rows in which documents begin where `starts`, (batch, time), is true.

    A step of size `FORGETS`, a power of two, leaves nothing of the state unless a rate is as small as 1e-16. Its u is
    multiplied by delta / FORGETS, so that it writes as a step of size delta does. Where something is not finite it
    would leave NaN: documents are then computed step by step.
    """
    if not are_apart(starts, (u, delta, B, C, options["initial_state"])):
        return step_by_step(u, delta, A, B, C, D, initial_state=options["initial_state"], starts=starts)
    precise = ops.state_dtype(u.dtype)
    first = starts[..., None]
    written = torch.where(first, u.to(precise) * delta / FORGETS, u.to(precise))
    # h = exp(-FORGETS rate) h + FORGETS (u delta / FORGETS) B: an empty state, and the write of a step of size delta.
    size = torch.where(first, FORGETS, delta)
    y, state = ops.selective_scan(written, size, A, B.to(precise), C.to(precise), **options)
    return (y + D * u).to(u.dtype), state


@torch.no_grad()
def draw_step_biases_(bias: Tensor) -> None:
    """Fills `bias` with numbers whose softplus is from `SMALLEST_STEP` to `LARGEST_STEP`."""
    logs = torch.empty_like(bias, dtype=torch.float32)
    step = logs.uniform_(math.log(SMALLEST_STEP), math.log(LARGEST_STEP)).exp()
    # The inverse of softplus: log(exp(step) - 1), without its overflow.
    bias.copy_(step + torch.log(-torch.expm1(-step)))
