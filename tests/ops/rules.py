"""The update rules as one table, and what it takes to run a row of it: a new rule is one row of `RULES`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

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
    """What the inputs of one test look like, and the generator that they come from."""

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


@dataclass(frozen=True)
class Rule:
    """One row: an operation, what it takes beside q, k and v, and where it is worth testing."""

    name: str
    operation: str
    extras: Callable[[Draw], Inputs]
    regimes: tuple[str, ...]
    keys: Callable[[Draw], Tensor] = Draw.free_keys

    @property
    def operation_name(self) -> str:
        """Its key in `ops.RULES`."""
        return self.operation.removesuffix("_rule").replace("_", "-")

    @property
    def corrects(self) -> bool:
        """Whether it takes out what a key retrieves, so that the keys of a state hang together."""
        return ops.RULES[self.operation_name].corrects

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
            "k": self.keys(draw).to(dtype),
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
        return getattr(ops, self.operation)(**inputs, backend=backend, **options)

    def reference(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The module of definitions, past the checks and the choice of a backend."""
        return getattr(ops.reference, self.operation)(**inputs)


GATES = ("ordinary", "near one", "one", "tiny", "one or tiny", "ordinary or tiny", "ordinary or erased")
REPEATED = ("repeated keys", "repeated keys, one")
STRENGTHS = ("ordinary", "near one", "one", "tiny", "zero", "zero or one", *REPEATED, "positive keys")
# Of what both decays and corrects, whose write strengths may go up to 2.
BOTH = (*GATES, "zero, one or two", "repeated keys, one")


def decays(draw: Draw, key: bool = True, value: bool = True) -> Inputs:
    shape = (draw.B, draw.T, draw.H)
    log_key_decay = draw.log_decay(*shape, draw.K) if key else None
    return {"log_key_decay": log_key_decay, "log_value_decay": draw.log_decay(*shape, draw.V) if value else None}


def strengths(draw: Draw) -> Inputs:
    return {"beta": draw.write_strength(draw.B, draw.T, draw.H)}


def gated_delta(draw: Draw, per_key: bool) -> Inputs:
    shape = (draw.B, draw.T, draw.H)
    log_gate = draw.log_decay(*shape, draw.K) if per_key else draw.log_decay(*shape)
    return {"beta": draw.write_strength(*shape), "log_gate": log_gate}


def two_gates(draw: Draw) -> Inputs:
    erase = draw.bounded_keys() * torch.sigmoid(draw.normal(draw.B, draw.T, draw.H, draw.K))
    return {"erase": erase, "beta": None, **decays(draw, value=False)}


RULES = (
    Rule("sum", "sum_rule", lambda draw: {}, ("ordinary",)),
    Rule("gated", "gated_rule", lambda draw: {"log_gate": draw.log_decay(draw.B, draw.T, draw.H)}, GATES),
    Rule("decay", "decay_rule", decays, GATES),
    Rule("decay of keys", "decay_rule", partial(decays, value=False), GATES),
    Rule("decay of values", "decay_rule", partial(decays, key=False), GATES),
    Rule("decay of neither", "decay_rule", partial(decays, key=False, value=False), ("ordinary",)),
    Rule("delta", "delta_rule", strengths, STRENGTHS, Draw.bounded_keys),
    Rule("gated delta", "gated_delta_rule", partial(gated_delta, per_key=False), BOTH, Draw.bounded_keys),
    Rule("Kimi delta", "gated_delta_rule", partial(gated_delta, per_key=True), BOTH, Draw.bounded_keys),
    Rule("two gates", "fast_weight_rule", two_gates, ("ordinary", "ordinary or erased"), Draw.bounded_keys),
)
RULE = {rule.name: rule for rule in RULES}
PRINCIPAL = [RULE[name] for name in ("sum", "gated", "decay", "delta")]
RULES_AND_REGIMES = [(rule, regime) for rule in RULES for regime in rule.regimes]


def mapped(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Of each tensor that there is, another."""
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
    # Only for what may have any strides: the last dimension is not contiguous.
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
