"""Steps of generation that compiled kernels for CPUs take as a whole, but for a layer's projections (`cpu/steps/`).

A layer's step is a dozen operators or more, on few numbers each. In a model their code is no longer in the processor's
cache when it is the layer's turn again, as all weights have gone through it: they take longer than reading the layer's
weights does. What an operator here computes is what the mixer that calls it does without, up to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fairseq_fastweights.ops import libraries, native, native_operators
from fairseq_fastweights.ops.checks import values_are_checked

delta_step_: Any = native_operators.delta_step_
window_step_: Any = native_operators.window_step_
gated_delta_step_: Any = native_operators.gated_delta_step_


def may_take(x: Tensor, backend: str) -> bool:
    """True if the operators take a step of a layer with the input x: on a CPU, and nothing is differentiated.

    Nor do they run under torch.compile, which joins operators by itself, or under autocast.
    """
    return (
        x.is_cpu
        and not torch.is_grad_enabled()
        and backend in ("auto", "native")
        and x.dtype in native.DTYPES["cpu"]
        and not torch.compiler.is_compiling()
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled("cpu")
        and not values_are_checked()
        and libraries.load("cpu") is None
    )


def own(state: Tensor, in_place: bool) -> Tensor:
    """The state that a step may change: itself, or a copy."""
    if not in_place or not state.is_contiguous():
        return state.clone(memory_format=torch.contiguous_format)
    native.mark_changed(state)
    return state
