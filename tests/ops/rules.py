"""The update rules as one table, and what it takes to run a row of it: a new rule is one row of `RULES`."""

from __future__ import annotations

import hashlib
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

TOLERANCE = {
    torch.float32: 1e-5,  # what the project promises of every backend, up to T = 4096
    # Half a unit in the last place is 4e-3; out and gradients are rounded once at least. float16 has three bits more.
    torch.bfloat16: 2e-2,
    torch.float16: 2e-2,
    # 1e-16 times the terms of a sum; logs of -1e4 cost four digits of it within a chunk.
    torch.float64: 1e-11,
}


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
        """Its key in `ops.OPERATIONS`."""
        return self.operation.removesuffix("_rule").replace("_", "-")

    @property
    def corrects(self) -> bool:
        """Whether it takes out what a key retrieves, so that the keys of a state hang together."""
        return not ops.OPERATIONS[self.operation_name].keys_apart

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


def decays(*, key: bool, value: bool) -> Callable[[Draw], Inputs]:
    def draw_decays(draw: Draw) -> Inputs:
        shape = (draw.B, draw.T, draw.H)
        return {
            "log_key_decay": draw.log_decay(*shape, draw.K) if key else None,
            "log_value_decay": draw.log_decay(*shape, draw.V) if value else None,
        }

    return draw_decays


def strengths(draw: Draw) -> Inputs:
    return {"beta": draw.write_strength(draw.B, draw.T, draw.H)}


def gated_delta(*, per_key: bool) -> Callable[[Draw], Inputs]:
    def draw_gates(draw: Draw) -> Inputs:
        shape = (draw.B, draw.T, draw.H)
        log_gate = draw.log_decay(*shape, draw.K) if per_key else draw.log_decay(*shape)
        return {"beta": draw.write_strength(*shape), "log_gate": log_gate}

    return draw_gates


def two_gates(draw: Draw) -> Inputs:
    return {
        "erase": draw.bounded_keys() * torch.sigmoid(draw.normal(draw.B, draw.T, draw.H, draw.K)),
        "beta": None,
        "log_key_decay": draw.log_decay(draw.B, draw.T, draw.H, draw.K),
        "log_value_decay": None,
    }


RULES = (
    Rule("sum", "sum_rule", lambda draw: {}, ("ordinary",)),
    Rule("gated", "gated_rule", lambda draw: {"log_gate": draw.log_decay(draw.B, draw.T, draw.H)}, GATES),
    Rule("decay", "decay_rule", decays(key=True, value=True), GATES),
    Rule("decay of keys", "decay_rule", decays(key=True, value=False), GATES),
    Rule("decay of values", "decay_rule", decays(key=False, value=True), GATES),
    Rule("decay of neither", "decay_rule", decays(key=False, value=False), ("ordinary",)),
    Rule("delta", "delta_rule", strengths, STRENGTHS, Draw.bounded_keys),
    Rule("gated delta", "gated_delta_rule", gated_delta(per_key=False), BOTH, Draw.bounded_keys),
    Rule("Kimi delta", "gated_delta_rule", gated_delta(per_key=True), BOTH, Draw.bounded_keys),
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


def cotangents(outputs: tuple[Tensor, Tensor], seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random gradients for out and final_state, of their own dtypes."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in outputs]
    return drawn[0].to(outputs[0]), drawn[1].to(outputs[1])


def differentiate(
    outputs: tuple[Tensor, Tensor], inputs: Inputs, weights: tuple[Tensor | None, Tensor | None]
) -> Inputs:
    """Gradients by name of whatever in `inputs` needs one; None in `weights`: not used."""
    leaves = {n: x for n, x in inputs.items() if x is not None and x.requires_grad}
    used = [(y, w) for y, w in zip(outputs, weights, strict=True) if w is not None]
    grads = torch.autograd.grad([y for y, _ in used], list(leaves.values()), [w for _, w in used], allow_unused=True)
    return dict(zip(leaves, grads, strict=True))


def in_float64(tensors: Inputs) -> Inputs:
    """The same values, rounded as they are, as new leaves in float64, on the CPU."""
    return mapped(tensors, lambda x: x.detach().cpu().double().requires_grad_(x.requires_grad))


_definitions: dict[tuple, Inputs] = {}


def definition(rule: Rule, inputs: Inputs, weights: tuple[Tensor | None, Tensor | None] | None) -> Inputs:
    """Outputs and, where `weights` are given, gradients of the float64 reference, computed once for all that ask."""
    inputs = in_float64(inputs)
    used = None if weights is None else tuple(None if w is None else w.cpu().double() for w in weights)
    given = [None if x is None else x.detach() for x in (*inputs.values(), *(used or ()))]
    numbers = (x if x is None else (hashlib.sha256(x.numpy().tobytes()).digest(), x.shape) for x in given)
    key = (rule, tuple((name, x is not None and x.requires_grad) for name, x in inputs.items()), *numbers)
    if key not in _definitions:
        if len(_definitions) == 256:
            _definitions.clear()
        outputs = rule.reference(inputs)
        grads = None if used is None else differentiate(outputs, inputs, used)
        _definitions[key] = named((outputs[0].detach(), outputs[1].detach()), grads)
    return dict(_definitions[key])


def named(outputs: tuple[Tensor, Tensor], grads: Inputs | None = None) -> Inputs:
    gradients = {f"gradient of {name}": grad for name, grad in (grads or {}).items()}
    return {"out": outputs[0], "final_state": outputs[1]} | gradients


def detached(inputs: Inputs, *, but: str = "") -> Inputs:
    """The same numbers, none of which needs a gradient but the one that is named."""
    return {name: None if x is None else x.detach().requires_grad_(name == but) for name, x in inputs.items()}


def outcome(rule: Rule, backend: str, inputs: Inputs, **options: object) -> Inputs:
    """Outputs and gradients by name, for the cotangents that `assert_agrees` draws too."""
    outputs = rule.run(inputs, backend, **options)
    return named(outputs, differentiate(outputs, inputs, cotangents(outputs)))


def parts(tensors: Inputs, rows: Sequence[str]) -> Inputs:
    """As many parts of the batch as `rows` names, under those names."""
    if not rows:
        return tensors
    chunks = {name: [None] * len(rows) if x is None else x.chunk(len(rows)) for name, x in tensors.items()}
    return {f"{name} ({row})": x for name, split in chunks.items() for row, x in zip(rows, split, strict=True)}


def relative_error(actual: Tensor | None, expected: Tensor | None, vanishing: float = 0) -> float:
    """Norm of the difference over the norm of `expected` (over 1 where that is at most `vanishing`)."""
    if expected is None:
        return 0.0 if actual is None else actual.double().norm().item()
    if actual is None:
        return 1.0 if expected.norm() > vanishing else 0.0
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} != {tuple(expected.shape)}"
    actual, expected = actual.cpu().double(), expected.cpu().double()
    norm = expected.norm().item()
    return (actual - expected).norm().item() / (norm if norm > vanishing else 1.0)


def assert_close(actual: Inputs, expected: Inputs, tolerance: float, vanishing: float = 0) -> None:
    assert actual.keys() == expected.keys()
    errors = {name: relative_error(actual[name], expected[name], vanishing) for name in expected}
    # `not <=` and no `>`: a NaN is a failure.
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, f"relative errors above {tolerance:g}: {wrong}"


def assert_same(actual: Inputs, expected: Inputs, when: str) -> None:
    """The same bits in the same dtypes."""
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert actual[name].dtype == x.dtype and torch.equal(actual[name], x), f"{name} {when}"


def assert_agrees(
    rule: Rule,
    backend: str,
    inputs: Inputs,
    tolerance: float | None = None,
    *,
    use: str = "out, final_state",
    lay: Callable[[Tensor], Tensor] = lambda x: x,
    rows: Sequence[str] = (),
) -> None:
    """Outputs and every gradient of `backend` are those of the float64 reference; what it was given stays as it was.

    `use` names the outputs that the loss is of; `lay` lays their gradients; `rows` are equal parts that all must agree.
    """
    before = mapped(inputs, lambda x: x.detach().clone())
    outputs = rule.run(inputs, backend)
    dtype = next(iter(inputs.values())).dtype
    assert [x.dtype for x in outputs] == [dtype, state_dtype(dtype)], "dtypes of the outputs"
    drawn = [lay(x) for x in cotangents(outputs)]
    weights = (drawn[0] if "out" in use else None, drawn[1] if "state" in use else None)
    copies = [x.clone() for x in drawn]
    grads = differentiate(outputs, inputs, weights)
    for name, grad in grads.items():
        assert grad is None or grad.dtype == inputs[name].dtype, f"dtype of the gradient of {name}"
    for name, x in before.items():
        assert x is None or torch.equal(inputs[name], x), f"{name} was changed"
    assert all(torch.equal(x, y) for x, y in zip(drawn, copies, strict=True)), "a cotangent was changed"
    expected = definition(rule, inputs, weights)
    # What hundreds of decays and corrections leave is a difference of numbers that are larger by far.
    vanishing = 1e-20 if rule.corrects and "log" in "".join(inputs) else 0
    assert_close(parts(named(outputs, grads), rows), parts(expected, rows), tolerance or TOLERANCE[dtype], vanishing)


def assert_autocast_does_not_reach_inside(rule: Rule, backend: str, dtype: torch.dtype, **sizes: int) -> None:
    """Autocast decides what projections hand over; from there on types are as outside it, backwards too."""
    inputs = rule.inputs(**{"T": 70} | sizes, dtype=dtype, extras_dtype=torch.float32)
    expected = outcome(rule, backend, inputs)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        inside = outcome(rule, backend, inputs)
        outputs = rule.run(inputs, backend)
    assert_same(inside, expected, "inside autocast")
    backwards_outside = named(outputs, differentiate(outputs, inputs, cotangents(outputs)))
    assert_same(backwards_outside, expected, "backwards outside it")
