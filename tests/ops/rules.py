"""The update rules as one table of cases, which follows from `ops.RULES`, and the means to run a row of it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fairseq_fastweights import ops

BACKENDS = ("chunkwise", "native")  # with passes of their own, held against the float64 reference
# Where they run; the reference runs on the CPU.
DEVICE = torch.device(os.environ.get("FASTWEIGHTS_TEST_DEVICE", "cpu"))
CPU_KERNELS = "about the CPU kernels"  # the reason to skip a test elsewhere
on_cpu = pytest.mark.skipif(DEVICE.type != "cpu", reason=CPU_KERNELS)

Inputs = dict[str, Tensor | None]


@dataclass(frozen=True)
class Draw:
    """The form of the inputs of one test, and the generator that they come from."""

    B: int
    T: int
    H: int
    K: int
    V: int
    dtype: torch.dtype
    regime: str
    generator: torch.Generator

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)

    def log_decay(self, *shape: int) -> Tensor:
        """Logs of gates, at most 0."""
        tiny, logsigmoid = math.log(1e-6), torch.nn.functional.logsigmoid
        match self.regime:
            case "ordinary" | "zero, one or two" | "repeated keys, one":
                return logsigmoid(self.normal(*shape) + 1)
            case "near one":  # from 1 - 1e-3 to 1 - 1e-8, where 1 - exp(log g) has no digits left in float32
                return -(10 ** -(3 + 5 * self.uniform(*shape)))
            case "one":
                return torch.zeros(*shape, dtype=torch.float64)
            case "tiny":
                return torch.full(shape, tiny, dtype=torch.float64)
            case "one or tiny":
                return torch.where(self.uniform(*shape) < 0.7, 0.0, tiny)
            case "ordinary or tiny":  # large cumulative logs, of which float32 has not the digits of the differences
                ordinary = logsigmoid(self.normal(*shape) + 3)
                return torch.where(self.uniform(*shape) < 0.7, ordinary, tiny)
            case "ordinary or erased":  # exp(-1e4) is 0 in every float type: a reset of the state
                ordinary = logsigmoid(self.normal(*shape) + 3)
                return torch.where(self.uniform(*shape) < 0.9, ordinary, -1e4)
        raise ValueError(f"no such regime of gates: {self.regime!r}")

    def write_strength(self, *shape: int) -> Tensor:
        match self.regime:
            case "near one":
                return 1 - 10 ** -(3 + 5 * self.uniform(*shape))
            case "one" | "repeated keys, one":
                return torch.ones(*shape, dtype=torch.float64)
            case "tiny":
                return torch.full(shape, 1e-6, dtype=torch.float64)
            case "zero":
                return torch.zeros(*shape, dtype=torch.float64)
            case "zero or one":
                return (self.uniform(*shape) < 0.5).double()
            case "zero, one or two":
                return (3 * self.uniform(*shape)).floor()
        return torch.sigmoid(self.normal(*shape))

    def free_keys(self) -> Tensor:
        return self.normal(self.B, self.T, self.H, self.K)

    def bounded_keys(self) -> Tensor:
        """Keys of norm at most 1, without which I - beta k k^T would make states of the delta rule grow and grow."""
        keys = self.free_keys()
        if self.regime == "positive keys":  # sum normalisation, Schlag et al., Eq. 29
            keys = keys.abs() + 1e-3
            return keys / keys.sum(-1, keepdim=True)
        keys = torch.nn.functional.normalize(keys, dim=-1)
        if self.regime.startswith("repeated keys") and self.T:
            # Two keys, at random: a series for the inverse in the WY form would sum powers up to 1e18 in a chunk of 64.
            chosen = (self.uniform(self.T) < 0.5).long()
            keys = keys[:, chosen.clamp(max=self.T - 1)]
        return keys


GATES = ("ordinary", "near one", "one", "tiny", "one or tiny", "ordinary or tiny", "ordinary or erased")
REPEATED = ("repeated keys", "repeated keys, one")
STRENGTHS = ("ordinary", "near one", "one", "tiny", "zero", "zero or one", *REPEATED, "positive keys")
# For rules that decay and correct, whose beta may go up to 2.
BOTH = (*GATES, "zero, one or two", "repeated keys, one")


@dataclass(frozen=True)
class RuleCase:
    """A row: a rule of `ops.RULES` with all its gates or some, and where it is worth testing.

    Attributes:
        name: of the row.
        operation_name: its key in `ops.RULES`.
        without: gates that are None.
        per: what a gate that may have a number for each head, or for each key, has.
        only: these regimes alone.
    """

    name: str
    operation_name: str
    without: tuple[str, ...] = ()
    per: str = "head"
    only: tuple[str, ...] = ()

    @property
    def operation(self) -> str:
        """The name of its function in `ops`, if it has one."""
        return f"{self.operation_name.replace('-', '_')}_rule"

    @property
    def record(self) -> ops.Rule:
        return ops.RULES[self.operation_name]

    @property
    def corrects(self) -> bool:
        return self.record.corrects

    @property
    def regimes(self) -> tuple[str, ...]:
        """Regimes of gates that decay, of write strengths, or of both."""
        decays = any(gate.log and gate.name not in self.without for gate in self.record.gates)
        if self.corrects:
            return self.only or (BOTH if decays else STRENGTHS)
        return GATES if decays else ("ordinary",)

    def extras(self, draw: Draw) -> Inputs:
        """Its gates, in order; drawn are the keys among them first, then the decays."""
        dims = {"head": (), "key": (draw.K,), "value": (draw.V,)}
        drawn: Inputs = dict.fromkeys(gate.name for gate in self.record.gates)
        for gate in sorted(self.record.gates, key=lambda gate: (gate.kind != "key", not gate.log)):
            shape = draw.B, draw.T, draw.H, *dims[self.per if gate.per == "head or key" else gate.per]
            if gate.kind == "key":
                drawn[gate.name] = draw.bounded_keys() * torch.sigmoid(draw.normal(*shape))
            elif gate.name not in self.without:
                drawn[gate.name] = draw.log_decay(*shape) if gate.log else draw.write_strength(*shape)
        return drawn

    def inputs(
        self,
        *,
        B: int = 2,
        T: int = 31,
        H: int = 2,
        K: int = 5,
        V: int = 3,
        dtype: torch.dtype = torch.float32,
        extras_dtype: torch.dtype | None = None,
        regime: str = "ordinary",
        initial_state: bool = True,
        requires_grad: bool = True,
        seed: int = 0,
    ) -> Inputs:
        """Arguments by name, in the order of the signature, each a leaf tensor or None."""
        draw = Draw(B, T, H, K, V, dtype, regime, torch.Generator().manual_seed(seed))
        drawn: Inputs = {
            "q": draw.normal(B, T, H, K).to(dtype),
            "k": (draw.bounded_keys() if self.corrects else draw.free_keys()).to(dtype),
            "v": draw.normal(B, T, H, V).to(dtype),
        }
        for name, extra in self.extras(draw).items():
            # An erase key is a key.
            drawn[name] = None if extra is None else extra.to(dtype if name == "erase" else extras_dtype or dtype)
        state = draw.normal(B, H, K, V).to(state_dtype(dtype))
        drawn["initial_state"] = state if initial_state else None
        return mapped(drawn, lambda x: x.contiguous().to(DEVICE).requires_grad_(requires_grad))

    def in_regimes(self, regimes: Sequence[str], **kwargs) -> Inputs:
        """Rows of the batch in each of these regimes, `B` of each, for `assert_agrees` to tell apart."""
        each = [self.inputs(regime=regime, requires_grad=False, **kwargs) for regime in regimes]
        together = {name: None if x is None else torch.cat([one[name] for one in each]) for name, x in each[0].items()}
        return mapped(together, Tensor.requires_grad_)

    def run(self, inputs: Inputs, backend: str, **options) -> tuple[Tensor, Tensor]:
        if hasattr(ops, self.operation):
            return getattr(ops, self.operation)(**inputs, backend=backend, **options)
        *given, state = inputs.values()
        return self.record(*given, initial_state=state, backend=backend, **options)

    def reference(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The module of definitions, past the checks and the choice of a backend."""
        names = ["q", "k", "v", *(gate.name for gate in self.record.gates)]
        others = {name: x for name, x in inputs.items() if name not in names}
        return self.record.reference(*(inputs[name] for name in names), **others)


VARIANTS = {
    "decay": (
        RuleCase("decay", "decay"),
        RuleCase("decay of keys", "decay", without=("log_value_decay",)),
        RuleCase("decay of values", "decay", without=("log_key_decay",)),
        RuleCase("decay of neither", "decay", without=("log_key_decay", "log_value_decay")),
    ),
    "delta-mao": (),  # it runs the delta rule's kernels: tests/mixers/test_update_rules.py
    "gated-delta": (RuleCase("gated delta", "gated-delta"), RuleCase("Kimi delta", "gated-delta", per="key")),
    "fast-weight": (
        RuleCase(
            "two gates", "fast-weight", ("beta", "log_value_decay"), "key", only=("ordinary", "ordinary or erased")
        ),
    ),
}
"""The rows of rules that have not just one."""

RULES = tuple(row for name in ops.RULES for row in VARIANTS.get(name, (RuleCase(name, name),)))
RULE = {rule.name: rule for rule in RULES}
PRINCIPAL = [RULE[name] for name in ("sum", "gated", "decay", "delta")]
RULES_AND_REGIMES = [(rule, regime) for rule in RULES for regime in rule.regimes]


def mapped(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Changes each tensor that there is."""
    return {name: None if x is None else change(x) for name, x in inputs.items()}


def windows(x: Tensor, dim: int = 0) -> Tensor:
    """Along `dim` each row is the one before, moved on by one number: two dimensions have a stride of 1."""
    rows = x.movedim(dim, 0)
    signal = torch.cat([rows[0], rows[1:, ..., -1].movedim(0, -1)], -1)
    return signal.unfold(-1, x.shape[-1], 1).movedim(-2, dim)


LAYOUT: dict[str, Callable[[Tensor], Tensor]] = {
    "as fairseq": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),  # (time, batch, channel)
    # As q is of a joint projection for q, k and v.
    "a slice": lambda x: torch.cat([x * torch.nan, x, x * torch.nan], -1)[..., x.shape[-1] : -x.shape[-1]],
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    # Only for tensors that may have any strides: the last dimension is not contiguous.
    "turned": lambda x: x.transpose(2, -1).contiguous().transpose(2, -1),
    "same for all rows": lambda x: x[:1].expand(x.shape),
    "same for all heads": lambda x: x[:, :, :1].expand(x.shape),  # of a state, for all keys
    # `.sum().backward()` sends such a gradient, with a last stride of 0 too.
    "constant": lambda x: x[(0,) * (x.dim() - 1)].expand(x.shape),
    "one number": lambda x: x[(0,) * x.dim()].expand(x.shape),
    "windows": windows,
    "windows of time": lambda x: windows(x, 1),
    "windows of heads": lambda x: windows(x, 2) if x.dim() > 3 else x,
}
"""The same numbers (or some of them again and again) another way in memory."""


def deal(rows: Sequence, columns: Sequence, values: Sequence) -> list[tuple]:
    """Each row with each column, and values in turn: each row and column meets each if there are not more values."""
    pairs = [(i, j) for i in range(len(rows)) for j in range(len(columns))]
    return [(rows[i], columns[j], values[(i + j) % len(values)]) for i, j in pairs]


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
