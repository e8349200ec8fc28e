"""Documents one after the other in a row, and heads of q and k that several of v share: of every rule and backend."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fairseq_fastweights import ops
from fairseq_fastweights.ops import kernels
from tests.ops.agreement import TOLERANCE, assert_close, assert_same
from tests.ops.results import cotangents, differentiate, in_float64, named, outcome
from tests.ops.rules import BACKENDS, DEVICE, RULE, RULES, Inputs, RuleCase, deal, mapped, on_cpu

EVERY = ("reference", *BACKENDS)
# Keys and values step by step in tiles, with few keys, and by chunks.
SIZES = [(5, 3), (20, 24), (65, 66)]
# Where documents begin in a row: nowhere; at chunks and between them, side by side; at the first step and at the last.
STARTS = [[], [16, 32, 64, 112], [0, 5, 6, 7, 40, 69], [1, 63, 64, 65, 129]]


def where(T: int, *rows: list[int]) -> Tensor:
    starts = torch.zeros(len(rows), T, dtype=torch.bool)
    for row, steps in zip(starts, rows, strict=True):
        row[[t for t in steps if t < T]] = True
    return starts.to(DEVICE)


def apart(rule: RuleCase, inputs: Inputs, starts: Tensor, backend: str) -> Inputs:
    """The expected result of `starts`: each document of each row in a call of its own."""
    outs, states = [], []
    for b, row in enumerate(starts):
        begins = sorted({0, *row.nonzero().flatten().tolist()})
        pieces = []
        for begin, end in zip(begins, [*begins[1:], starts.shape[1]], strict=True):
            piece = {n: None if x is None else x[b : b + 1, begin:end] for n, x in inputs.items()}
            goes_on = begin == 0 and not row[0] and inputs["initial_state"] is not None
            piece["initial_state"] = inputs["initial_state"][b : b + 1] if goes_on else None
            out, state = rule.run(piece, backend)
            pieces.append(out)
        outs.append(torch.cat(pieces, 1))
        states.append(state)
    outputs = torch.cat(outs), torch.cat(states)
    grads = differentiate(outputs, inputs, cotangents(outputs))
    return named(outputs, {n: torch.zeros_like(inputs[n]) if x is None else x for n, x in grads.items()})


DEALT = deal(RULES, SIZES, list(zip(STARTS, STARTS[::-1], strict=True)))


@pytest.mark.parametrize(
    ("backend", "rule", "size", "starts"),
    [(x, *case) for x in EVERY for case in DEALT if x != "reference" or case[1] == SIZES[0]],
)
def test_documents_are_as_apart(backend, rule, size, starts):
    """Outputs, gradients and final states: in float64 as the reference has them, in float32 to 1e-6."""
    K, V = size
    inputs = rule.inputs(B=2, T=130 if backend != "reference" else 40, H=2, K=K, V=V, dtype=torch.float64)
    at = where(inputs["v"].shape[1], *starts)
    actual = outcome(rule, backend, inputs, starts=at)
    assert_close(actual, apart(rule, inputs, at, "reference"), TOLERANCE[torch.float64], vanishing=1e-20)
    inputs = mapped(inputs, lambda x: x.detach().float().requires_grad_())
    actual, expected = outcome(rule, backend, inputs, starts=at), apart(rule, inputs, at, backend)
    assert_close(actual, expected, 1e-6)


@pytest.mark.parametrize("rule", RULES)
@on_cpu
def test_documents_that_begin_at_chunks_have_the_same_bits(rule):
    """In the kernels: their chunks begin at multiples of 16, and so do the 64 steps after which states are kept."""
    for (K, V), dtype in zip(SIZES, (torch.float32, torch.float64, torch.bfloat16), strict=True):
        inputs = rule.inputs(B=2, T=100, H=2, K=K, V=V, dtype=dtype, regime=rule.regimes[-1])
        at = where(100, [16, 48, 64], [0, 32, 64, 96])
        assert_same(outcome(rule, "native", inputs, starts=at), apart(rule, inputs, at, "native"), "apart")


@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize("rule", RULES)
def test_a_step_that_begins_a_document(rule, backend):
    inputs = rule.inputs(B=3, T=1, K=6, V=7, requires_grad=False)
    state = inputs.pop("initial_state")
    at = torch.tensor([[True], [False], [True]], device=DEVICE)
    kept = torch.where(at[..., None, None], 0, state)
    expected = named(rule.reference(in_float64(inputs | {"initial_state": kept})))
    for in_place in (False, True):
        outputs = rule.run(inputs | {"initial_state": state.clone()}, backend, starts=at, in_place=in_place)
        assert_close(named(outputs), expected, 1e-6)


@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize("rule", RULES)
def test_heads_that_are_shared(rule, backend):
    """Two heads of q and k, and of an erase key, for six of v: as if each had been repeated, gradients added up."""
    for T in (1, 70):
        inputs = rule.inputs(B=2, T=T, H=6, K=20, V=18, dtype=torch.float64)
        keys = {
            n: inputs[n][:, :, :2].detach().contiguous().requires_grad_() for n in ("q", "k", "erase") if n in inputs
        }
        repeated = inputs | {n: x.repeat_interleave(3, 2) for n, x in keys.items()}
        outputs = rule.reference(repeated)
        expected = named(outputs, differentiate(outputs, inputs | keys, cotangents(outputs)))
        assert_close(outcome(rule, backend, inputs | keys), expected, TOLERANCE[torch.float64], vanishing=1e-20)
        in_half = mapped(inputs | keys, lambda x: x.detach().bfloat16())
        in_half["initial_state"] = inputs["initial_state"].detach().float()
        half = named(rule.run(in_half, backend))
        assert_close(half, named(rule.reference(in_float64(in_half))), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize(
    "gates", list(itertools.product([None, "head", "key"], [None, "value"], [False, True])), ids=str
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_part_of_the_general_rule_with_every_other(backend, gates):
    """Documents, shared heads, keys that repeat, write strengths of 0, 1 and 2, decays from 1 to 0.

    No kernel takes decays of values with an erase key, and "chunkwise" goes through these step by step.
    """
    key_decay, value_decay, strengths = gates
    drawn = RULE["gated delta"].inputs(T=70, H=4, K=6, regime="repeated keys, one", dtype=torch.float64)
    per_key = RULE["decay"].inputs(T=70, H=4, K=6, regime="ordinary or erased", dtype=torch.float64)
    one_in_three = RULE["gated delta"].inputs(T=70, H=4, regime="zero, one or two", dtype=torch.float64)["beta"]
    inputs = {n: drawn[n][:, :, :2].detach().contiguous().requires_grad_() for n in ("q", "k")}
    inputs |= {"v": drawn["v"], "beta": one_in_three if strengths else None}
    inputs["log_key_decay"] = {None: None, "head": drawn["log_gate"], "key": per_key["log_key_decay"]}[key_decay]
    inputs |= {"log_value_decay": per_key["log_value_decay"] if value_decay else None}
    inputs["initial_state"] = drawn["initial_state"]
    at, own = where(70, [5, 64], []), (inputs["k"] * 0.7).detach().requires_grad_()
    for erase in (None, inputs["k"], own):
        given = inputs | {"erase": erase}
        if backend == "native" and erase is not None and value_decay:
            with pytest.raises(ops.BackendUnavailable, match="takes decays of values together with an erase key"):
                RULE["two gates"].run(given, backend)
            continue
        leaves = {n: x for n, x in given.items() if n != "erase" or erase is own}
        outcomes = []
        for name in (backend, "reference"):
            outputs = RULE["two gates"].run(given, name, starts=at)
            outcomes.append(named(outputs, differentiate(outputs, leaves, cotangents(outputs))))
        assert_close(*outcomes, TOLERANCE[torch.float64], vanishing=1e-20)


@on_cpu
def test_shared_heads_are_not_copied(monkeypatch):
    """The kernels read them where they lie."""
    inputs = RULE["gated delta"].inputs(B=1, T=40, H=4, requires_grad=False)
    k = inputs["k"][:, :, :2].contiguous()
    monkeypatch.setattr(kernels, "ungrouped", None)
    ops.gated_delta_rule(**inputs | {"q": k, "k": k}, backend="native")
