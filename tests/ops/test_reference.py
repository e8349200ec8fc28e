"""The reference against the papers, by closed forms in NumPy; and types and shapes of any backend."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from fairseq_fastweights.mixers.update_rules import UPDATE_RULES
from fairseq_fastweights.ops import RULES as RECORDS
from fairseq_fastweights.ops.checks import without_autocast
from tests.ops.agreement import TOLERANCE, assert_autocast_does_not_reach_inside, assert_close, parts
from tests.ops.results import definition, differentiate, named
from tests.ops.rules import DEVICE, RULES, mapped, state_dtype
from tests.ops.test_selective_scan import SCAN

ROUNDING = 1e-12  # in float64 a few dozen operations leave a hundredth of it; a wrong equation differs by far more


# Closed forms, for a row and a head: q, k (T, K), v (T, V), S0 (V, K) as in the papers. Each sums over the steps s <= t
# that were written, where the reference goes step by step.


def sum_closed_form(q, k, v, S0):
    """Y = (Q K^T, masked) V + Q S0^T: Schlag et al., Eq. 15, read as linear attention."""
    return np.tril(q @ k.T) @ v + q @ S0.T, S0 + v.T @ k


def decay_closed_form(q, k, v, S0, log_key_decay, log_value_decay, write=None):
    """Mao, Eq. 7: each entry (i, j) of the state decays by z_i f_j, and writes are not gated."""
    f = np.ones_like(k) if log_key_decay is None else np.exp(log_key_decay)
    z = np.ones_like(v) if log_value_decay is None else np.exp(log_value_decay)
    G = z[:, :, None] * f[:, None, :]
    write = np.ones(len(q)) if write is None else write
    states = [
        G[: t + 1].prod(0) * S0 + sum(G[s + 1 : t + 1].prod(0) * write[s] * np.outer(v[s], k[s]) for s in range(t + 1))
        for t in range(len(q))
    ]
    return np.stack([S @ q[t] for t, S in enumerate(states)]), states[-1]


def gated_closed_form(q, k, v, S0, log_gate):
    """Peng et al.'s rule (Schlag et al., Eq. 52; Mao, Eq. 5): write (1 - g_t), keep g_t."""
    return decay_closed_form(q, k, v, S0, log_gate[:, None] * np.ones_like(k), None, -np.expm1(log_gate))


def corrected_closed_form(q, k, v, S0, erase=None, beta=None, log_key_decay=None, log_value_decay=None, log_gate=None):
    """Schlag et al., Eq. 24, unrolled: a write passes through all later Diag(f) (I - beta e k^T)."""
    assert log_value_decay is None
    T, K = k.shape
    beta = np.ones(T) if beta is None else beta
    erase = k if erase is None else erase
    logs = log_gate if log_key_decay is None else log_key_decay
    f = np.ones((T, 1)) if logs is None else np.exp(logs).reshape(T, -1)
    keep = [(np.ones(K) * f[t])[:, None] * (np.eye(K) - beta[t] * np.outer(erase[t], k[t])) for t in range(T)]

    def later(s: int, t: int) -> np.ndarray:
        return functools.reduce(np.matmul, keep[s : t + 1], np.eye(K))

    states = [
        S0 @ later(0, t) + sum(beta[s] * np.outer(v[s], k[s]) @ later(s + 1, t) for s in range(t + 1)) for t in range(T)
    ]
    return np.stack([S @ q[t] for t, S in enumerate(states)]), states[-1]


# By rule. Those that have none are held against their equation as layers have it (tests/mixers).
CLOSED_FORMS = {
    "sum": sum_closed_form,
    "gated": gated_closed_form,
    "decay": decay_closed_form,
    **dict.fromkeys(("delta", "gated-delta", "fast-weight"), corrected_closed_form),
}
assert {*CLOSED_FORMS, *UPDATE_RULES} >= {*RECORDS}


@pytest.mark.parametrize("initial_state", [True, False], ids=["state", "no-state"])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.operation_name in CLOSED_FORMS])
def test_is_the_papers_equation(rule, initial_state):
    for regime in rule.regimes:
        inputs = rule.inputs(T=9, K=5, V=3, dtype=torch.float64, regime=regime, initial_state=initial_state)
        out, final_state = rule.reference(inputs)
        arrays = mapped(inputs, lambda x: x.detach().cpu().numpy())
        S0 = arrays.pop("initial_state")
        for b, h in ((0, 0), (0, 1), (1, 0)):
            one = {n: None if x is None else x[b, :, h] for n, x in arrays.items()}
            papers_S0 = np.zeros((3, 5)) if S0 is None else S0[b, h].T
            expected = CLOSED_FORMS[rule.operation_name](one.pop("q"), one.pop("k"), one.pop("v"), papers_S0, **one)
            assert_close(
                named((out[b, :, h], final_state[b, h].T)), named([torch.tensor(x) for x in expected]), ROUNDING
            )


@pytest.mark.parametrize("rule", RULES)
def test_gradients_are_those_of_finite_differences(rule):
    """Second and forward ones too: it is plain PyTorch, so whoever needs them has a backend for them."""
    inputs = rule.inputs(B=1, T=4, H=2, K=3, V=2, dtype=torch.float64)
    names = [name for name, x in inputs.items() if x is not None]

    def run(*tensors):
        return rule.reference(inputs | dict(zip(names, tensors, strict=True)))

    assert torch.autograd.gradcheck(run, [inputs[name] for name in names], check_forward_ad=True)

    def gradient(q, v):
        out, state = rule.reference(inputs | {"q": q, "v": v})
        return torch.autograd.grad(out.pow(3).sum() + state.pow(3).sum(), v, create_graph=True)

    assert torch.autograd.gradcheck(gradient, (inputs["q"], inputs["v"]))


@pytest.mark.parametrize("rule", RULES)
def test_takes_any_float_type(rule):
    """To the project's tolerances against float64, whatever the gates; autocast does not reach inside."""
    for dtype in TOLERANCE:
        inputs = rule.in_regimes(rule.regimes, T=16, dtype=dtype, initial_state=False)
        out, final_state = rule.run(inputs, "reference")
        assert (out.dtype, final_state.dtype) == (dtype, state_dtype(dtype))
        # On another device exp rounds in another way.
        tolerance = 0.0 if dtype == torch.float64 and DEVICE.type == "cpu" else TOLERANCE[dtype]
        found, expected = named((out, final_state)), definition(rule, inputs, None)
        assert_close(parts(found, rule.regimes), parts(expected, rule.regimes), tolerance, vanishing=1e-20)
        assert_autocast_does_not_reach_inside(rule, "reference", dtype, T=20)


def test_autocast_is_off_inside_and_back_after():
    """Nothing is asked of a device without autocast."""
    x = torch.ones(2, 2, device=DEVICE)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        with without_autocast(x):
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16
        with without_autocast(x.to("meta")):
            assert (x @ x).dtype == torch.bfloat16


CASES = [("reference", 5, torch.bfloat16), ("chunkwise", 70, torch.bfloat16), ("auto", 1, torch.float64)]


@pytest.mark.parametrize(("backend", "T", "dtype"), CASES)
@pytest.mark.parametrize("rule", [*RULES, SCAN])
def test_shapes_on_meta(rule, backend, T, dtype):
    drawn = rule.inputs(T=T, dtype=dtype)
    inputs = mapped(drawn, lambda x: x.detach().to("meta").requires_grad_())
    outputs = rule.run(inputs, backend)
    for found, real in zip(outputs, rule.run(drawn, "reference"), strict=True):
        assert found.is_meta and (found.shape, found.dtype) == (real.shape, real.dtype)
    for name, grad in differentiate(outputs, inputs, [x.detach() for x in outputs]).items():
        assert grad.is_meta and (grad.shape, grad.dtype) == (inputs[name].shape, inputs[name].dtype)
