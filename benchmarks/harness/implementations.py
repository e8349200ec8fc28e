"""The implementations of a comparison, the project's and those of peers, each with inputs in its own layout."""

import importlib
import itertools
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
    """An implementation is not measured: its status and the reason, or nothing, if the case is not among its own."""


@dataclass(frozen=True)
class Work:
    """A call that is ready to be timed, with contiguous inputs in the implementation's own layout."""

    forward: Callable[[], Tensor]
    inputs: list[Tensor]  # those that get gradients
    d_out: Tensor  # in the output's layout
    as_reference: Callable[[Tensor], Tensor] = lambda out: out  # brings it to (batch, time, heads, value_dim)

    def run_forward(self) -> Tensor:
        with torch.no_grad():
            return self.forward()

    def run_both(self) -> tuple[Tensor, ...]:
        """Forward and backward: the gradients of all inputs."""
        return torch.autograd.grad(self.forward(), self.inputs, self.d_out)


@dataclass(frozen=True)
class Implementation:
    """An implementation of a rule."""

    name: str
    rule: str  # one of `cases.RULES`, or "softmax" for attention
    prepare: Callable[[Shape, Inputs], Work]  # may raise `Refusal`
    same: bool = True  # its output must equal that of the project's rule
    compiles: bool = False  # its first call compiles, and may take long


def leaf(x: Tensor) -> Tensor:
    """A contiguous copy of x that gets a gradient."""
    return x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()


def _leaves(rule: str, inputs: Inputs) -> list[Tensor]:
    return [leaf(x) for x in (inputs.q, inputs.k, inputs.v, *inputs.gates[rule])]


def _heads_first(call: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, inputs: Inputs) -> Work:
    """The work of a call with the layout (batch, heads, time, dim); transpositions are not timed."""
    tensors = [leaf(x.transpose(1, 2)) for x in (q, k, inputs.v)]
    d_out = inputs.d_out.transpose(1, 2).contiguous()
    return Work(lambda: call(*tensors), tensors, d_out, lambda out: out.transpose(1, 2))


# Chunkwise, which every machine has, comes first: the others' outputs are compared with its own. The reference is a
# loop over time, and takes part in decode steps alone.
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


# torch's causal attention, with heads of value_dim as in a Transformer of the same width.
SOFTMAX = "SDPA"


def _prepare_softmax(shape: Shape, inputs: Inputs) -> Work:
    if shape.steps:
        raise Refusal  # its decode steps depend on the tokens before them: see generation.py
    attend = partial(F.scaled_dot_product_attention, is_causal=True)
    return _heads_first(attend, inputs.wide_q, inputs.wide_k, inputs)


# The optional peer of pytorch-fast-transformers: the sum rule on the CPU, one step at a time. build_causal_product.py
# builds it, with compiler flags that are known.
CAUSAL_PRODUCT = "causal_product"
PEERS = ROOT / "build" / "peers"


def _prepare_causal_product(shape: Shape, inputs: Inputs) -> Work:
    if inputs.v.dtype != torch.float32 or shape.steps:  # it takes neither another dtype nor an initial state
        raise Refusal
    if not (PEERS / "fast_transformers").is_dir():
        raise Refusal("unavailable", "benchmarks/build_causal_product.py was not run")
    if str(PEERS) not in sys.path:
        sys.path.insert(0, str(PEERS))
    call = importlib.import_module("fast_transformers.causal_product").causal_dot_product
    return _heads_first(call, inputs.q, inputs.k, inputs)


# The optional peer flash-linear-attention (Triton kernels on a GPU): rule, module, names of the gates ("": by
# position). Each module has functions chunk_MODULE and fused_recurrent_MODULE.
FLASH_LINEAR_ATTENTION = "fla"
_MODULES = (
    ("delta", "delta_rule", [""]),
    ("sum", "linear_attn", []),
    ("decay", "gla", ["gk", "gv"]),
    ("gated", "simple_gla", ["g"]),
    ("gated_delta", "gated_delta_rule", ["beta", "g"]),
    ("kimi_delta", "kda", ["beta", "g"]),
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
        if module == "simple_gla":  # y = S q with S = exp(g) S + (1 - exp(g)) k v: the gated rule
            k = k * -torch.expm1(given[0]).unsqueeze(-1)
        if gates == [""]:
            return function(q, k, v, *given, **options)[0]
        return function(q, k, v, **dict(zip(gates, given, strict=True)), **options)[0]

    return Work(forward, tensors, inputs.d_out)


def all_implementations(rules: Sequence[str], device: str) -> list[Implementation]:
    """All implementations of these rules on a device, and attention."""
    found = [Implementation(name, rule, partial(_prepare_ours, name, rule)) for name in BACKENDS for rule in rules]
    found.append(Implementation(SOFTMAX, "softmax", _prepare_softmax, same=False))
    if device == "cuda":
        for way, (rule, module, gates) in itertools.product(("chunk", "fused_recurrent"), _MODULES):
            if rule in rules:
                # chunk_gla takes the decays of the keys alone, and so computes another rule.
                partly, name = way == "chunk" and module == "gla", f"{way}_{module}"
                prepare = partial(_prepare_fla, rule, module, name, [""] if partly else gates)
                peer = f"{FLASH_LINEAR_ATTENTION} {name}"
                found.append(Implementation(peer, rule, prepare, same=not partly, compiles=True))
    elif "sum" in rules:
        found.append(Implementation(CAUSAL_PRODUCT, "sum", _prepare_causal_product))
    return found
