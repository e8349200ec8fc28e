"""What takes part in a comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.cases import Inputs, Shape


class Unavailable(Exception):
    """This contestant cannot do what is asked here; the message says why."""


class Unsuitable(Exception):
    """The case is none of this contestant's: nobody would look for it there."""


@dataclass(frozen=True)
class Work:
    """A contestant's call, ready to be timed: inputs are in its own layout, contiguous.

    Attributes:
        forward: computes the output.
        inputs: what gets a gradient in the backward pass: everything that the output depends on.
        d_out: the gradient that arrives at the output, in the output's layout.
        as_reference: brings the output to (batch, time, heads, value_dim).
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
    """An implementation of a rule.

    Attributes:
        name: the implementation; with `rule` it names the contestant.
        rule: one of `cases.RULES`, or "softmax" for attention.
        prepare: makes its work from a shape and its inputs; raises `Unavailable` where it cannot take part.
        same: whether it computes what the reference computes, so that outputs can be compared.
        compiles: whether its first call at a shape takes long, so that under a budget the others are measured before.
    """

    name: str
    rule: str
    prepare: Callable[[Shape, Inputs], Work]
    same: bool = True
    compiles: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} {self.rule}"


def leaf(x: Tensor) -> Tensor:
    """A contiguous copy of x that gets a gradient."""
    return x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
