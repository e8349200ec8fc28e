"""Attention transfer: mixers learn to reproduce the output of the attention that they replace.

This is the first step of conversions with few updates (Zhang et al. 2024, LoLCATs, Sec. 3.2; Goldstein et al. 2025,
RADLADS, step 1). No text is predicted, and only the mixers are trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fairseq_fastweights.conversion.transfer.base_model import BaseModel
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.mixer import State
from fairseq_fastweights.mixers.softmax_attention import SoftmaxAttention


class AttentionTransfer:
    """Compares mixers with the attention of the teacher.

    One forward pass of the teacher, up to the last converted layer, serves all layers: each passes on the output of the
    attention, so that all layers have the inputs of the teacher's layers.

    Args:
        teacher: the model whose attention weights are kept here.
        decoder: a decoder with as many layers, whose weights outside its mixers are those of the teacher.

    Raises:
        ValueError: if all mixers are softmax attention.
    """

    def __init__(self, teacher: BaseModel, decoder: Any) -> None:
        self._pairs = [
            (mixer, build_attention(teacher, number))
            for number, mixer in enumerate(decoder.mixers)
            if not isinstance(mixer, SoftmaxAttention)
        ]
        if not self._pairs:
            raise InvalidInput("criterion is attention_transfer; the model must have a mixer other than softmax")

    def errors(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        """The mean square of each mixer's error, divided by that of the attention's output.

        Args:
            model: the model of the decoder.
            inputs: the arguments of its `forward`.

        Returns:
            (mixers,), with gradients to the mixers' parameters alone, if gradients are enabled.
        """
        errors: list[Tensor] = []
        wanted = torch.is_grad_enabled()
        for mixer, attention in self._pairs:
            mixer.forward = partial(self._teach, mixer.forward, attention, errors, wanted)
        try:
            with torch.no_grad(), suppress(_AllCompared):
                model(**inputs, features_only=True)
        finally:
            for mixer, _ in self._pairs:
                del mixer.forward
        return torch.stack(errors)

    def _teach(
        self,
        forward: Callable[..., tuple[Tensor, State]],
        attention: SoftmaxAttention,
        errors: list[Tensor],
        gradients: bool,
        x: Tensor,
        state: State | None = None,
        padding: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, State]:
        """In place of a mixer's `forward`: returns the attention's output, and adds the mixer's error to `errors`."""
        target, _ = attention.to(x)(x, None, padding, **options)
        with torch.set_grad_enabled(gradients):
            given, state = forward(x, state, padding, **options)
            difference, size = (given - target).float().square(), target.float().square()
            if padding is not None:
                difference, size = (y.masked_fill(padding.t()[..., None], 0) for y in (difference, size))
            errors.append(difference.sum() / size.sum())
        if len(errors) == len(self._pairs):  # the last mixer: the rest of the pass is not needed
            raise _AllCompared
        return target, state


class _AllCompared(Exception):
    """Ends a forward pass after the last mixer that is compared."""


def build_attention(teacher: BaseModel, layer: int) -> SoftmaxAttention:
    """The attention of a teacher's layer, counted from 0, without dropout."""
    start = f"decoder.layers.{layer}.self_attn."
    weights = {name.removeprefix(start): x for name, x in teacher.weights.items() if name.startswith(start)}
    options, heads = teacher.options, teacher.options["decoder_attention_heads"]
    inner, width = weights["q_proj.weight"].shape
    head_dim = inner // heads
    biases = "none" if "q_proj.bias" not in weights else "all" if "out_proj.bias" in weights else "qkv"
    attention = SoftmaxAttention(
        width,
        heads,
        rotary_dim=options.get("rotary_dim", 0),
        rotary_base=options.get("rotary_base", 10000.0),
        rotary_scaling=options.get("rotary_scaling", ""),
        kv_heads=len(weights["k_proj.weight"]) // head_dim,
        head_dim=head_dim,
        projection_bias=biases,
        query_key_norm_eps=options.get("query_key_norm_eps"),
        zero_centered_norms=options.get("zero_centered_norms", False),
        joint_norm=options.get("softmax_joint_norm", False),
        output_gate="output_gate_proj.weight" in weights,
    )
    attention.load_state_dict(weights)
    return attention.requires_grad_(False).eval()
