"""The contestants of a comparison: this project's rules and other implementations, each in the layout that suits it."""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_fastweights import ops
from harness import ROOT
from harness.cases import RULES, Inputs, Shape


class Refusal(Exception):
    """A contestant does not take part: its status and the reason. Without, the case is none of its own."""


@dataclass(frozen=True)
class Work:
    """A contestant's call, ready to be timed: inputs are in its own layout, contiguous.

    `forward` computes the output; `inputs`, all that it depends on, get gradients from `d_out`, which is of the
    output's layout; `as_reference` brings that to (batch, time, heads, value_dim).
    """

    forward: Callable[[], Tensor]
    inputs: list[Tensor]
    d_out: Tensor
    as_reference: Callable[[Tensor], Tensor] = lambda out: out

    def run_forward(self) -> Tensor:
        with torch.no_grad():
            return self.forward()

    def run_both(self) -> tuple[Tensor, ...]:
        """Forward and backward: the gradients of all inputs."""
        return torch.autograd.grad(self.forward(), self.inputs, self.d_out)


@dataclass(frozen=True)
class Contestant:
    """An implementation of a rule, one of `cases.RULES` or "softmax" for attention.

    `prepare` makes its work from a shape and its inputs, or raises `Refusal`; `same` says whether it computes what the
    reference does, so that outputs can be compared; `compiles`, whether its first call compiles, and may take long.
    """

    name: str
    rule: str
    prepare: Callable[[Shape, Inputs], Work]
    same: bool = True
    compiles: bool = False


def leaf(x: Tensor) -> Tensor:
    """A contiguous copy of x that gets a gradient."""
    return x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()


def _leaves(rule: str, inputs: Inputs) -> list[Tensor]:
    return [leaf(x) for x in (inputs.q, inputs.k, inputs.v, *inputs.gates[rule])]


def _heads_first(call: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, inputs: Inputs) -> Work:
    """The work of a call that gets the layout (batch, heads, time, dim): no transposition is timed."""
    tensors = [leaf(x.transpose(1, 2)) for x in (q, k, inputs.v)]
    d_out = inputs.d_out.transpose(1, 2).contiguous()
    return Work(lambda: call(*tensors), tensors, d_out, lambda out: out.transpose(1, 2))


# Chunkwise, which is there on every machine, comes first and says what is right. The reference is a loop over time: for
# one step it is what "auto" took before there were kernels.
BACKENDS = ("chunkwise", "native", "reference")


def _prepare_ours(backend: str, rule: str, shape: Shape, inputs: Inputs) -> Work:
    if backend == "reference" and not shape.steps:
        raise Refusal
    tensors = _leaves(rule, inputs)

    def forward() -> Tensor:
        try:
            return RULES[rule](*tensors, initial_state=inputs.state, backend=backend)[0]
        except ops.BackendUnavailable as error:
            raise Refusal("unavailable", str(error).replace(f"{ROOT}{os.sep}", "")) from error

    return Work(forward, tensors, inputs.d_out)


# The peer that the rules replace: torch's causal attention; heads of value_dim, as a Transformer of this width has.
SOFTMAX = "SDPA"


def _prepare_softmax(shape: Shape, inputs: Inputs) -> Work:
    if shape.steps:
        raise Refusal  # a token's time depends on how many there are before it: see generation.py
    attend = partial(F.scaled_dot_product_attention, is_causal=True)
    return _heads_first(attend, inputs.wide_q, inputs.wide_k, inputs)


# The optional peer of pytorch-fast-transformers: the sum rule on the CPU, one step at a time. build_causal_product.py
# puts it into a folder of its own; of one that is installed the compiler's flags would be unknown.
CAUSAL_PRODUCT = "causal_product"
PEERS = ROOT / "build" / "peers"


def _prepare_causal_product(shape: Shape, inputs: Inputs) -> Work:
    if inputs.v.dtype != torch.float32 or shape.steps:  # it has no other dtype and no state to start from
        raise Refusal
    if not (PEERS / "fast_transformers").is_dir():
        raise Refusal("unavailable", "benchmarks/build_causal_product.py was not run")
    if str(PEERS) not in sys.path:
        sys.path.insert(0, str(PEERS))
    call = importlib.import_module("fast_transformers.causal_product").causal_dot_product
    return _heads_first(call, inputs.q, inputs.k, inputs)


# The optional peer flash-linear-attention (Triton kernels on a GPU): rule, module, function, the names of the rule's
# gates that it takes ("": in its place), whether it is the rule. The gated rule is simple_gla with keys that were
# multiplied by 1 - g. chunk_gla has the key decays alone.
FLASH_LINEAR_ATTENTION = "fla"
_FUNCTIONS = (
    ("delta", "delta_rule", "chunk_delta_rule", [""], True),
    ("sum", "linear_attn", "chunk_linear_attn", [], True),
    ("decay", "gla", "chunk_gla", [""], False),
    ("gated", "simple_gla", "chunk_simple_gla", ["g"], True),
    ("gated_delta", "gated_delta_rule", "chunk_gated_delta_rule", ["beta", "g"], True),
    ("kimi_delta", "kda", "chunk_kda", ["beta", "g"], True),
    ("delta", "delta_rule", "fused_recurrent_delta_rule", [""], True),
    ("sum", "linear_attn", "fused_recurrent_linear_attn", [], True),
    ("decay", "gla", "fused_recurrent_gla", ["gk", "gv"], True),
    ("gated", "simple_gla", "fused_recurrent_simple_gla", ["g"], True),
    ("gated_delta", "gated_delta_rule", "fused_recurrent_gated_delta_rule", ["beta", "g"], True),
    ("kimi_delta", "kda", "fused_recurrent_kda", ["beta", "g"], True),
)


def _prepare_fla(rule: str, module: str, name: str, gates: list[str], shape: Shape, inputs: Inputs) -> Work:
    try:
        function = getattr(importlib.import_module(f"fla.ops.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise Refusal("unavailable", f"{type(error).__name__}: {error}") from error
    tensors = _leaves(rule, inputs)[: 3 + len(gates)]
    options: dict[str, Any] = {"scale": 1.0} | ({"normalize": False} if module == "linear_attn" else {})
    if inputs.state is not None:
        options |= {"initial_state": inputs.state, "output_final_state": True}

    def forward() -> Tensor:
        q, k, v, *given = tensors
        if module == "simple_gla":
            k = k * -torch.expm1(given[0]).unsqueeze(-1)
        if gates == [""]:
            return function(q, k, v, *given, **options)[0]
        return function(q, k, v, **dict(zip(gates, given, strict=True)), **options)[0]

    return Work(forward, tensors, inputs.d_out)


def all_contestants(rules: Sequence[str], device: str) -> list[Contestant]:
    """Everybody who does these rules on a device, or next to them."""
    found = [Contestant(name, rule, partial(_prepare_ours, name, rule)) for name in BACKENDS for rule in rules]
    found.append(Contestant(SOFTMAX, "softmax", _prepare_softmax, same=False))
    if device == "cuda":
        for rule, module, name, gates, same in _FUNCTIONS:
            if rule in rules:
                prepare = partial(_prepare_fla, rule, module, name, gates)
                found.append(Contestant(f"{FLASH_LINEAR_ATTENTION} {name}", rule, prepare, same, compiles=True))
    elif "sum" in rules:
        found.append(Contestant(CAUSAL_PRODUCT, "sum", _prepare_causal_product))
    return found
