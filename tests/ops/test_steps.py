"""Decode steps of layers as one operator of the CPU kernels: the mixers' results without it, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fairseq_fastweights.mixers.mixer import Mixer
from fairseq_fastweights.mixers.registry import build_mixer
from fairseq_fastweights.ops import backends, kernels
from tests.mixers import contract
from tests.ops.rules import DEVICE

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="the operators are for CPUs")

HEADS = 4
LEARNED = {"feature_map": "relu", "normalization": frozenset({"sum"})}
# Of whole vectors, and of less; where all heads have keys of their own, or share them; rotated and normed.
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("window-sum", 16, {"window_sum_window": 3, "kv_heads": 2, "rotary_dim": 8}),
    ("window-sum", 5, {"window_sum_window": 1, "kv_heads": 1, "normalization": frozenset({"attention"})}),
    ("window-sum", 32, {"window_sum_window": 20, "rotary_dim": 32, "query_key_norm_eps": 1e-5}),
    ("delta", 16, LEARNED | {"kv_heads": 2, "query_key_norm_eps": 1e-5}),
    ("delta", 5, LEARNED | {"feature_dim": 18, "bias": False}),
    ("gated-delta", 16, {"gated_delta_kv_heads": 2, "gated_delta_gate_rank": 3, "gated_delta_bias": True}),
    ("gated-delta", 5, {"gated_delta_key_heads": 2, "gated_delta_key_dim": 67, "gated_delta_value_dim": 70}),
    ("gated-delta", 5, {"gated_delta_conv": 1, "gated_delta_negative_eigenvalues": True}),
]
OPERATORS = {"window-sum": "window_step_", "delta": "delta_step_", "gated-delta": "gated_delta_step_"}
# Their sums are added in another order; in 16 bits each of a mixer's operators rounds.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, **contract.HALF}
WHOLE_DOCUMENTS = ("gated-delta", "delta")  # which take the operator in no step in which a document begins


def build(name: str, dim: int, settings: dict[str, Any], dtype: torch.dtype, backend: str) -> Mixer:
    torch.manual_seed(0)
    shape = {"num_heads": HEADS, "fast_weight_heads": HEADS, "head_dim": dim, "backend": backend}
    return contract.spread(build_mixer(name, HEADS * dim, shape | settings)).to(dtype)


@torch.no_grad()
def step_by_step(mixer: Mixer, x: Tensor, starts: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    outs, state = [], None
    for t in range(len(x)):
        begins = {} if starts is None else {"starts": starts[:, t : t + 1]}
        out, state = mixer(x[t : t + 1], state, overwrite=True, **begins)
        outs.append(out)
    assert state is not None
    return torch.cat(outs), state


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("name", "dim", "settings"), CASES)
def test_a_step_in_one_kernel_is_the_definition(monkeypatch, name, dim, settings, documents, dtype):
    x = contract.draw(9, HEADS * dim).to(dtype)
    starts = torch.zeros(contract.BATCH, len(x), dtype=torch.bool)
    starts[0, 3] = starts[1, 5] = starts[1, 6] = True
    taken, operator = [], getattr(kernels, OPERATORS[name])
    monkeypatch.setattr(kernels, OPERATORS[name], lambda *given: taken.append(1) or operator(*given))
    results = []
    for backend in ("native", "reference"):
        mixer = build(name, dim, settings, dtype, backend)
        if dtype not in (torch.float32, torch.float64) and backend == "reference":
            mixer, x = mixer.double(), x.double()
        results.append(step_by_step(mixer, x, starts if documents else None))
    (out, state), (expected, after) = results
    assert len(taken) == (0 if documents and name in WHOLE_DOCUMENTS else len(x) - 1)
    assert out.dtype == dtype and contract.error(out, expected) <= TOLERANCE[dtype]
    assert set(state) == set(after)
    for n, tensor in state.items():
        assert contract.error(tensor, after[n]) <= TOLERANCE[dtype], n


@torch.no_grad()
@pytest.mark.parametrize(("name", "dim", "settings"), CASES[::3])
def test_a_step_that_is_not_finite_stays_in_its_row(name, dim, settings):
    mixer, x = build(name, dim, settings, torch.float32, "native"), contract.draw(6, HEADS * dim).float()
    expected, _ = step_by_step(mixer, x, None)
    x[2, 0] = torch.inf
    out, _ = step_by_step(mixer, x, None)
    assert torch.equal(out[:, 1:], expected[:, 1:]) and not out[2, 0].isfinite().any()


@torch.no_grad()
@pytest.mark.parametrize(("name", "dim", "settings"), CASES[::3])
def test_where_a_step_is_not_one_operator(monkeypatch, name, dim, settings):
    monkeypatch.setattr(kernels, OPERATORS[name], lambda *given: pytest.fail("the operator was called"))
    mixer, x = build(name, dim, settings, torch.float32, "auto"), contract.draw(3, HEADS * dim).float()
    _, state = mixer(x)
    padding = torch.zeros(contract.BATCH, 1, dtype=torch.bool)
    mixer(x[:1], state, padding)
    mixer(x[:2], state)
    with torch.enable_grad():
        mixer(x[:1].requires_grad_(), state)[0].sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixer(x[:1], state)
    build(name, dim, settings, torch.float32, "chunkwise")(x[:1], state)


def window(**others: Tensor | None) -> list[Any]:
    """The arguments of an operator, as of those below, some of them others."""
    given: dict[str, Any] = {"q": torch.zeros(2, 1, 4, 8), "k": torch.zeros(2, 1, 2, 8), "v": torch.zeros(2, 1, 2, 8)}
    given |= {"cosines": torch.ones(2, 1, 1, 3), "sines": torch.zeros(2, 1, 1, 3)}
    given |= {"seen": torch.zeros(2, 1, dtype=torch.long), "weight": torch.ones(4, 5, 8), "bias": torch.ones(4, 5)}
    given |= {"log_factor": torch.zeros(4), "sums": True, "eps": 0.1, "starts": None}
    given |= {"keys": torch.zeros(2, 2, 3, 8), "values": torch.zeros(2, 2, 3, 8), "state": torch.zeros(2, 4, 5, 9)}
    return list((given | others).values())


def delta(**others: Tensor) -> list[Any]:
    given: dict[str, Any] = {"q": torch.zeros(2, 1, 4, 8), "k": torch.zeros(2, 1, 2, 8), "v": torch.zeros(2, 1, 2, 6)}
    given |= {"beta": torch.zeros(1, 2, 4), "weight": torch.ones(4, 5, 8), "bias": torch.ones(4, 5), "eps": 0.1}
    return list((given | {"state": torch.zeros(2, 4, 5, 6)} | others).values())


def gated_delta(**others: Any) -> list[Any]:
    given: dict[str, Any] = {"x": torch.zeros(1, 2, 2 * 3 + 2 * 3 + 4 * 5)}
    given |= {"beta": torch.zeros(1, 2, 4), "decay": torch.zeros(1, 2, 4), "gate": torch.zeros(1, 2, 20)}
    given |= {"conv": torch.ones(32, 1, 4), "rate": torch.zeros(4), "bias": torch.zeros(4), "norm": torch.ones(5)}
    given |= {"q_heads": 2, "k_heads": 2, "v_heads": 4, "most": 1.0, "eps": 0.1}
    return list((given | {"before": torch.zeros(2, 3, 32), "memory": torch.zeros(2, 4, 3, 5)} | others).values())


@pytest.mark.parametrize(
    ("arguments", "others", "message"),
    [
        (window, {"q": torch.zeros(2, 1, 3, 8)}, "q has shape .2, 1, 3, 8.; .* of 4 heads"),
        (window, {"q": torch.zeros(2, 1, 2, 8)}, "q, k and v have 2, 2 and 2 heads; .* 4 and 2"),
        (window, {"k": torch.zeros(2, 1, 2, 7)}, "k has shape .2, 1, 2, 7.; it must be .2, 1, 2, 8."),
        (window, {"v": torch.zeros(2, 2, 2, 8)}, "v has shape .2, 2, 2, 8."),
        (window, {"v": torch.zeros(2, 1, 2, 8).double()}, "v is of type"),
        (window, {"cosines": torch.ones(2, 1, 1, 5)}, "cosines has shape .2, 1, 1, 5.; heads have 8"),
        (window, {"sines": torch.ones(1, 1, 1, 3)}, "sines has shape .1, 1, 1, 3."),
        (window, {"seen": torch.zeros(2, 1)}, "seen must be of int64"),
        (window, {"seen": torch.full((2, 1), -1)}, "seen holds -1; it must be at least 0"),
        (window, {"weight": torch.ones(4, 5, 7)}, "weight has shape"),
        (window, {"bias": torch.ones(5, 4).t()}, "bias has strides .1, 4.; it must be contiguous"),
        (window, {"log_factor": torch.ones(3)}, "log_factor has shape"),
        (window, {"starts": torch.zeros(1, 1, dtype=torch.bool)}, "starts has shape"),
        (window, {"keys": torch.zeros(2, 3, 3, 8)}, "keys has shape .* a divisor of 4"),
        (window, {"values": torch.zeros(2, 2, 4, 8)}, "values has shape"),
        (window, {"values": torch.zeros(2, 2, 3, 8).double()}, "values is of type Double; .* Float"),
        (window, {"state": torch.zeros(2, 4, 5, 8)}, "state has shape"),
        (delta, {"k": torch.zeros(2, 1, 3, 8)}, "k has shape .* of 4 heads or a divisor"),
        (delta, {"v": torch.zeros(2, 1, 2)}, "v .2, 1, 2.; they must be"),
        (delta, {"beta": torch.zeros(1, 2, 3)}, "beta has shape"),
        (delta, {"weight": torch.ones(4, 6, 8)}, "bias has shape"),
        (delta, {"state": torch.zeros(2, 4, 6, 5).transpose(2, 3)}, "state has strides"),
        (gated_delta, {"x": torch.zeros(1, 2, 31)}, "x has shape .1, 2, 31."),
        (gated_delta, {"q_heads": 3}, "3 heads; they must be a divisor of 4"),
        (gated_delta, {"gate": torch.zeros(1, 2, 19)}, "gate has shape"),
        (gated_delta, {"conv": torch.ones(32, 1, 3)}, "before has shape"),
        (gated_delta, {"norm": torch.ones(4)}, "norm has shape"),
        (gated_delta, {"before": torch.zeros(2, 3, 32).double()}, "before is of type Double"),
        (gated_delta, {"memory": torch.zeros(2, 4, 5, 3).transpose(2, 3)}, "state has strides"),
        (gated_delta, {"memory": torch.zeros(4, 3, 5)}, "state .4, 3, 5.; they must be"),
    ],
)
def test_operators_refuse_what_they_would_read_beyond(arguments, others, message):
    assert backends.why_not("cpu", torch.float32) is None
    operator = getattr(kernels, f"{arguments.__name__}_step_")
    operator(*arguments())
    with pytest.raises(RuntimeError, match=message):
        operator(*arguments(**others))
