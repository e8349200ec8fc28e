"""The reference against the papers: closed forms in NumPy, and what the rules promise.

Everything here is float64 on a few steps, so what separates two right answers is rounding alone:
about 1e-16 times a few dozen operations. `ROUNDING` leaves a factor of a hundred above that, and
the smallest mistake in an equation is orders of magnitude larger.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fairseq_fastweights import ops
from tests.ops.rules import (
    RULE,
    RULES,
    RULES_AND_REGIMES,
    assert_autocast_does_not_reach_inside,
    assert_close,
    definition,
    differentiate,
    label,
    relative_error,
    state_dtype,
)

ROUNDING = 1e-12


def array(x: torch.Tensor | None) -> np.ndarray | None:
    return None if x is None else x.detach().cpu().numpy()


# Closed forms, for one batch row and one head: q, k (T, K), v (T, V), S0 (V, K), the papers' form.
# Each sums over the steps s <= t that were written, where the reference goes step by step.


def sum_closed_form(q, k, v, S0):
    """Y = (Q K^T, masked) V + Q S0^T: Schlag et al., Eq. 15, read as linear attention."""
    return np.tril(q @ k.T) @ v + q @ S0.T, S0 + v.T @ k


def gated_closed_form(q, k, v, S0, log_gate):
    """Peng et al.'s rule (Schlag et al., Eq. 52; Mao, Eq. 5): write (1 - g_t), keep g_t."""
    T = len(q)
    g = np.exp(log_gate)
    states = [
        np.prod(g[: t + 1]) * S0
        + sum((np.prod(g[s + 1 : t + 1]) * -np.expm1(log_gate[s]) * np.outer(v[s], k[s])) for s in range(t + 1))
        for t in range(T)
    ]
    return np.stack([S @ q[t] for t, S in enumerate(states)]), states[-1]


def decay_closed_form(q, k, v, S0, log_key_decay, log_value_decay):
    """Mao, Eq. 7: each entry (i, j) of the state decays by z_i f_j, and writes are not gated."""
    T = len(q)
    f = np.ones_like(k) if log_key_decay is None else np.exp(log_key_decay)
    z = np.ones_like(v) if log_value_decay is None else np.exp(log_value_decay)
    G = z[:, :, None] * f[:, None, :]
    states = [
        G[: t + 1].prod(0) * S0 + sum(G[s + 1 : t + 1].prod(0) * np.outer(v[s], k[s]) for s in range(t + 1))
        for t in range(T)
    ]
    return np.stack([S @ q[t] for t, S in enumerate(states)]), states[-1]


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
        product = np.eye(K)
        for u in range(s, t + 1):
            product = product @ keep[u]
        return product

    states = [
        S0 @ later(0, t) + sum(beta[s] * np.outer(v[s], k[s]) @ later(s + 1, t) for s in range(t + 1)) for t in range(T)
    ]
    return np.stack([S @ q[t] for t, S in enumerate(states)]), states[-1]


CLOSED_FORMS = {
    "sum_rule": sum_closed_form,
    "gated_rule": gated_closed_form,
    "decay_rule": decay_closed_form,
    "delta_rule": corrected_closed_form,
    "gated_delta_rule": corrected_closed_form,
    "fast_weight_rule": corrected_closed_form,
}


@pytest.mark.parametrize("initial_state", [True, False], ids=["state", "no-state"])
@pytest.mark.parametrize(("rule", "regime"), RULES_AND_REGIMES, ids=label)
def test_is_the_papers_equation(rule, regime, initial_state):
    inputs = rule.inputs(T=9, K=5, V=3, dtype=torch.float64, regime=regime, initial_state=initial_state)
    out, final_state = rule.reference(inputs)
    arrays = {name: array(x) for name, x in inputs.items()}
    S0 = arrays.pop("initial_state")
    for b in range(2):
        for h in range(2):
            one = {n: None if x is None else x[b, :, h] for n, x in arrays.items()}
            papers_S0 = np.zeros((3, 5)) if S0 is None else S0[b, h].T
            expected, papers_S = CLOSED_FORMS[rule.operation](
                one.pop("q"), one.pop("k"), one.pop("v"), papers_S0, **one
            )
            actual = {"out": out[b, :, h], "final_state": final_state[b, h].T}
            named = {"out": torch.tensor(expected), "final_state": torch.tensor(papers_S)}
            assert_close(actual, named, ROUNDING)


@pytest.mark.parametrize("rule", RULES, ids=label)
def test_a_sequence_in_two_parts_is_the_sequence(rule):
    """At every point of it, the empty parts at both ends included."""
    inputs = rule.inputs(T=6, dtype=torch.float64, requires_grad=False)
    out, final_state = rule.reference(inputs)
    for at in range(7):
        state, parts = inputs["initial_state"], []
        for steps in (slice(0, at), slice(at, 6)):
            part = {n: None if x is None else x[:, steps] for n, x in inputs.items()}
            part_out, state = rule.reference(part | {"initial_state": state})
            parts.append(part_out)
        # The same operations in the same order: the same bits.
        assert torch.equal(torch.cat(parts, 1), out)
        assert torch.equal(state, final_state)


@pytest.mark.parametrize("initial_state", [True, False], ids=["state", "no-state"])
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_gradients_are_those_of_finite_differences(rule, initial_state):
    inputs = rule.inputs(B=1, T=4, H=2, K=3, V=2, dtype=torch.float64, initial_state=initial_state)
    names = [name for name, x in inputs.items() if x is not None]

    def run(*tensors):
        return rule.reference(inputs | dict(zip(names, tensors, strict=True)))

    assert torch.autograd.gradcheck(run, [inputs[name] for name in names])


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        # The project's tolerances against float64, which a plain loop in the same types must meet.
        (torch.float32, 1e-5),
        (torch.bfloat16, 2e-2),
        (torch.float16, 2e-2),
        (torch.float64, 0.0),
    ],
    ids=label,
)
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_takes_any_float_type(rule, dtype, tolerance):
    inputs = rule.inputs(T=16, dtype=dtype, requires_grad=False)
    out, final_state = rule.reference(inputs)
    assert out.dtype == dtype
    assert final_state.dtype == state_dtype(dtype)
    actual = {"out": out, "final_state": final_state}
    assert_close(actual, definition(rule, inputs, None), tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=label)
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_autocast_does_not_reach_inside(rule, dtype):
    assert_autocast_does_not_reach_inside(rule, "reference", dtype)


@pytest.mark.parametrize("rule", RULES, ids=label)
def test_is_what_backend_reference_runs(rule):
    inputs = rule.inputs(requires_grad=False)
    for actual, expected in zip(rule.run(inputs, "reference"), rule.reference(inputs), strict=True):
        assert torch.equal(actual, expected)


# Schlag et al., Appendix B, in numbers: orthonormal keys k1 and k2 hold v1 and v2; then v3 is
# written under k2.

K1 = torch.tensor([0.6, 0.8, 0.0], dtype=torch.float64)
K2 = torch.tensor([-0.8, 0.6, 0.0], dtype=torch.float64)
V1, V2, V3 = torch.eye(4, dtype=torch.float64)[:3] * torch.tensor([[2.0], [3.0], [5.0]])


def sequence(*steps: torch.Tensor) -> torch.Tensor:
    return torch.stack(steps)[None, :, None]


def after_rewriting(operation: str, **strength: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is read under k1 and k2 from a state of both, once v3 was written under k2."""
    state = (torch.outer(K1, V1) + torch.outer(K2, V2))[None, None]
    _, state = getattr(ops.reference, operation)(
        sequence(K2), sequence(K2), sequence(V3), **strength, initial_state=state
    )
    return K1 @ state[0, 0], K2 @ state[0, 0]


@pytest.mark.parametrize("beta", [0.0, 0.25, 1.0])
def test_delta_rule_rewrites_one_value_and_keeps_the_other(beta):
    strength = torch.full((1, 1, 1), beta, dtype=torch.float64)
    under_k1, under_k2 = after_rewriting("delta_rule", beta=strength)
    assert relative_error(under_k2, (1 - beta) * V2 + beta * V3) <= ROUNDING
    assert relative_error(under_k1, V1) <= ROUNDING


@pytest.mark.parametrize("gate", [1.0, 0.75, 0.01])
def test_gated_rule_also_erases_the_other_value(gate):
    log_gate = torch.full((1, 1, 1), gate, dtype=torch.float64).log()
    under_k1, under_k2 = after_rewriting("gated_rule", log_gate=log_gate)
    assert relative_error(under_k2, gate * V2 + (1 - gate) * V3) <= ROUNDING
    assert relative_error(under_k1, gate * V1) <= ROUNDING


@pytest.mark.parametrize("name", ["sum", "gated", "decay", "delta"])
def test_a_step_reads_what_it_has_just_written(name):
    """y_t = S_t q_t, not S_{t-1} q_t: the first output of an empty memory is not 0."""
    rule = RULE[name]
    inputs = rule.inputs(T=1, dtype=torch.float64, initial_state=False)
    out, final_state = rule.reference(inputs)
    assert out.norm() > 0.01
    read = torch.einsum("bhkv,bhk->bhv", final_state, inputs["q"][:, 0])
    assert relative_error(out[:, 0], read) <= ROUNDING


def test_gates_next_to_one_still_write():
    """1 - g for log g = -1e-10 is 1e-10 in float32 too, where exp(-1e-10) is exactly 1."""
    one = torch.ones(1, 1, 1, 1)
    out, _ = ops.reference.gated_rule(one, one, one, torch.full((1, 1, 1), -1e-10))
    assert relative_error(out, torch.full_like(out, 1e-10)) <= 1e-6  # a few float32 roundings


def test_a_column_of_ones_is_attention_normalisation():
    """Mao, Eq. 3: the normaliser z_t is the same recurrence with a value of 1."""
    inputs = RULE["sum"].inputs(dtype=torch.float64, initial_state=False, requires_grad=False)
    v = inputs["v"]
    beside_ones = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    out, _ = RULE["sum"].reference(inputs | {"v": beside_ones})
    z = torch.einsum("bthk,bthk->bth", inputs["q"], inputs["k"].cumsum(1))
    assert relative_error(out[..., -1], z) <= ROUNDING


@pytest.mark.parametrize("rule", RULES, ids=label)
def test_can_be_differentiated_twice(rule):
    """It is plain PyTorch, so whoever needs second derivatives has a backend for them."""
    inputs = rule.inputs(B=1, T=3, H=1, K=2, V=2, dtype=torch.float64)
    q, v = inputs["q"], inputs["v"]

    def gradient(q, v):
        out, state = rule.reference(inputs | {"q": q, "v": v})
        return torch.autograd.grad(out.pow(3).sum() + state.pow(3).sum(), v, create_graph=True)

    assert torch.autograd.gradcheck(gradient, (q, v))


@pytest.mark.parametrize("rule", RULES, ids=label)
def test_a_state_that_is_not_used_further_gets_no_gradient(rule):
    inputs = rule.inputs(dtype=torch.float64)
    outputs = rule.reference(inputs)
    grads = differentiate(outputs, inputs, (torch.ones_like(outputs[0]), None))
    assert all(grad is not None and grad.isfinite().all() for grad in grads.values())
