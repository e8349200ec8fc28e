"""The peer flash-linear-attention (Triton kernels on a GPU), optional, from PyPI.

The sum rule is its linear_attn without normalisation, the gated rule its simple_gla with keys that were multiplied by
1 - g, the delta rule its delta_rule. Of the decay rule its chunked gla has the key decays alone, its recurrent gla
both. retention, a gated rule whose gates are fixed, does less than ours.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from harness.cases import Inputs, Shape
from harness.contestants import Contestant, Unavailable, Work, leaf

NAME = "fla"

Form = Callable[..., Tensor]


def _sum(function: Callable[..., tuple[Tensor, Tensor]]) -> Form:
    return lambda q, k, v, **state: function(q, k, v, scale=1.0, normalize=False, **state)[0]


def _gated(function: Callable[..., tuple[Tensor, Tensor]]) -> Form:
    return lambda q, k, v, g, **state: function(q, k * -torch.expm1(g).unsqueeze(-1), v, g=g, scale=1.0, **state)[0]


def _key_decay(function: Callable[..., tuple[Tensor, Tensor]]) -> Form:
    return lambda q, k, v, gk, **state: function(q, k, v, gk, scale=1.0, **state)[0]


def _decay(function: Callable[..., tuple[Tensor, Tensor]]) -> Form:
    return lambda q, k, v, gk, gv, **state: function(q, k, v, gk=gk, gv=gv, scale=1.0, **state)[0]


def _delta(function: Callable[..., tuple[Tensor, Tensor]]) -> Form:
    return lambda q, k, v, beta, **state: function(q, k, v, beta, scale=1.0, **state)[0]


def _retention(function: Callable[..., tuple[Tensor, Tensor]]) -> Form:
    return lambda q, k, v, **state: function(q, k, v, scale=1.0, **state)[0]


# rule, module, function, how it is called, how many of the rule's gates it takes (None: all), whether it is the rule.
# Compiling them takes minutes: in the order in which they are missed where a budget ends.
_FUNCTIONS: tuple[tuple[str, str, str, Callable[..., Form], int | None, bool], ...] = (
    ("delta", "delta_rule", "chunk_delta_rule", _delta, None, True),
    ("sum", "linear_attn", "chunk_linear_attn", _sum, None, True),
    ("decay", "gla", "chunk_gla", _key_decay, 1, False),
    ("gated", "simple_gla", "chunk_simple_gla", _gated, None, True),
    ("delta", "delta_rule", "fused_recurrent_delta_rule", _delta, None, True),
    ("sum", "linear_attn", "fused_recurrent_linear_attn", _sum, None, True),
    ("decay", "gla", "fused_recurrent_gla", _decay, None, True),
    ("gated", "simple_gla", "fused_recurrent_simple_gla", _gated, None, True),
    ("gated", "retention", "chunk_retention", _retention, 0, False),
    ("gated", "retention", "fused_recurrent_retention", _retention, 0, False),
)


def contestants(rules: Iterable[str]) -> list[Contestant]:
    """The functions that are this project's rules, or next to them."""
    rules = set(rules)
    return [
        Contestant(f"{NAME} {function}", rule, _prepare(rule, module, function, form, gates), same, compiles=True)
        for rule, module, function, form, gates, same in _FUNCTIONS
        if rule in rules
    ]


def _prepare(
    rule: str, module: str, name: str, form: Callable[..., Form], gates: int | None
) -> Callable[[Shape, Inputs], Work]:
    def prepare(shape: Shape, inputs: Inputs) -> Work:
        try:
            function = getattr(importlib.import_module(f"fla.ops.{module}"), name)
        except (ImportError, AttributeError) as error:
            raise Unavailable(f"{type(error).__name__}: {error}") from error
        tensors = [leaf(x) for x in (inputs.q, inputs.k, inputs.v, *inputs.gates(rule)[:gates])]
        call = form(function)
        state = {} if inputs.state is None else {"initial_state": inputs.state, "output_final_state": True}
        return Work(lambda: call(*tensors, **state), tensors, inputs.d_out)

    return prepare
