"""The one layer of all models: a mixer and a feed-forward network, each with a norm and a residual connection.

It needs torch alone. `models.mixer_layers` makes fairseq's layers of it, `huggingface.modeling` that of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_fastweights.mixers.mixer import State
from fairseq_fastweights.mixers.projections import rms_norm
from fairseq_fastweights.ops.elementwise import gate

Branch = Callable[[Tensor], Tensor]
"""A function between a layer's norms and sums: its mixer or its feed-forward network."""

MASKED_LOGIT = -1e4
"""The logit of a token that is never predicted. Its probability is 0 in every type: e^-104 is, in float32.

It is finite, and in float16's range, because label smoothing sums all log-probabilities: with infinity, or the type's
lowest number, three of which overflow, the loss would be infinite, or NaN without smoothing.
"""

_NORMS = ("layer_norm", "layernorm", "_ln", "layernorm_embedding")


def form_of_layer(pre_norm: bool, parallel_residual: bool = False, output_norms: bool = False) -> str:
    """The `MixerLayer.form` that a model's settings ask for."""
    return "parallel" if parallel_residual else "output" if output_norms else "pre" if pre_norm else "post"


class MixerLayer(nn.Module):
    """Base class of layers. A subclass makes the modules, under the names that fairseq's layers give them.

    Attributes:
        form: where norms and sums are, for a branch f, the mixer or the feed-forward network:

            - "pre": x + f(norm(x)), one branch after the other;
            - "post": norm(x + f(x)), as in Vaswani et al. 2017;
            - "output": x + norm(f(x)), as in OLMo 2;
            - "parallel": x + mixer(norm_1(x)) + feed_forward(norm_2(x)), as in GPT-NeoX.
        batch_first: whether inputs are (batch, time, width) instead of (time, batch, width).
    """

    form = "pre"
    batch_first = False
    self_attn: nn.Module
    self_attn_layer_norm: nn.Module
    encoder_attn_layer_norm: nn.Module
    fc1: nn.Module
    fc2: nn.Module
    final_layer_norm: nn.Module
    dropout_module: nn.Module
    activation_dropout_module: nn.Module
    activation_fn: Callable[[Tensor], Tensor]

    def compute(self, x: Tensor, mix: Branch, read_source: Branch | None = None) -> Tensor:
        """The layer's equation.

        Args:
            x: (time, batch, width).
            mix: the mixer.
            read_source: attention to a source, the branch between the mixer and the feed-forward network, if there is
                one.
        """
        if self.form == "parallel":
            # Both branches read x, so that neither waits for the other's sum.
            mixed = mix(self.self_attn_layer_norm(x))
            hidden = self.feed_forward(self.final_layer_norm(x))
            return x + self.dropout_module(mixed) + self.dropout_module(hidden)
        x = self._add(x, mix, self.self_attn_layer_norm)
        if read_source is not None:
            x = self._add(x, read_source, self.encoder_attn_layer_norm)
        # Normformer (Shleifer et al. 2021) scales the residual of the feed-forward network alone.
        scale = getattr(self, "w_resid", None)
        return self._add(x, self.feed_forward, self.final_layer_norm, None if scale is None else scale * x)

    def _add(self, x: Tensor, branch: Branch, norm: nn.Module, residual: Tensor | None = None) -> Tensor:
        """x and a branch of it; `residual` takes the place of x in the sum."""
        y = branch(norm(x) if self.form == "pre" else x)
        y = self.dropout_module(norm(y) if self.form == "output" else y)
        y = (x if residual is None else residual) + y
        return norm(y) if self.form == "post" else y

    def feed_forward(self, x: Tensor) -> Tensor:
        """The network of each position."""
        hidden = self.activation_dropout_module(self.activation_fn(self.fc1(x)))
        norm = getattr(self, "ffn_layernorm", None)
        return self.fc2(hidden if norm is None else norm(hidden))

    def run_mixer(
        self,
        place: str,
        x: Tensor,
        padding: Tensor | None,
        states: dict[str, State | None] | None,
        *,
        overwrite: bool,
        **options: Tensor | None,
    ) -> Tensor:
        """Runs the mixer that is called `place`; `states`, by these names, are those before the call and then after it.

        Args:
            place: "self_attn" or "encoder_attn".
            x: as the layer's input.
            padding: (batch, time), true at padding; None for none.
            states: None if there are none to begin with and to keep.
            overwrite: whether the mixer may overwrite its state.
            options: others of the mixer; None are left out.
        """
        given = {name: value for name, value in options.items() if value is not None}
        padding = None if padding is None else padding.bool()
        # Mixers take (time, batch, width); rows of other modules are independent, in any layout.
        x = x.transpose(0, 1) if self.batch_first else x
        before = None if states is None else states[place]
        y, state = getattr(self, place)(x, before, padding, overwrite=overwrite, **given)
        if states is not None:
            states[place] = state
        return y.transpose(0, 1) if self.batch_first else y


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
    """Replaces a layer's feed-forward network by a SwiGLU network without biases."""
    inner_dim, dim = layer.fc1.out_features, layer.fc1.in_features
    layer.fc1, layer.fc2 = GatedLinear(dim, inner_dim), nn.Linear(inner_dim, dim, bias=False)
    layer.activation_fn = _same  # the gate has it


def use_rms_norms(module: nn.Module, eps: float, zero_centered: bool = False) -> None:
    """Replaces a module's own layer norms, not those of its submodules, by RMS norms."""
    for name, norm in list(module.named_children()):
        if name.endswith(_NORMS) and norm is not None:
            setattr(module, name, rms_norm(norm.normalized_shape, eps, zero_centered))


def draw_normal(module: nn.Module, std: float) -> None:
    """Draws the weights of a projection or of embeddings from N(0, std); those of other modules stay."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=std)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        nn.init.zeros_(module.weight[module.padding_idx])


def _same(x: Tensor) -> Tensor:
    return x


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    **dict.fromkeys(("gelu_accurate", "gelu_fast"), partial(F.gelu, approximate="tanh")),
    "tanh": torch.tanh,
    "linear": _same,
}
"""Activations by fairseq's names: "gelu_accurate" is "gelu_new" in transformers, "gelu_fast" its older name."""
