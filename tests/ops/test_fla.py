"""Backend "fla": by flash-linear-attention, where it is installed, and by functions with its signature."""

from __future__ import annotations

import builtins
import importlib.util
import itertools
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fairseq_fastweights import ops
from fairseq_fastweights.mixers.gated_delta import GatedDelta
from fairseq_fastweights.ops import backends
from tests.ops.agreement import TOLERANCE, assert_close
from tests.ops.results import cotangents, differentiate, in_float64, named, outcome
from tests.ops.rules import DEVICE, RULE, RULES
from tests.ops.test_documents import where

# Triton reads the variable when it is imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RUNS = importlib.util.find_spec("fla") is not None and (DEVICE.type == "cuda" or INTERPRETED)
NEEDS = "needs what pip install flash-linear-attention gives, and a GPU or TRITON_INTERPRET=1"
TAKEN = [rule for rule in RULES if rule.name not in ("decay", "decay of values", "two gates")]


def function(q, k, v, g=None, beta=None, *, scale, initial_state, output_final_state, cu_seqlens=None):
    """The signature of flash-linear-attention's functions, step by step in float64."""
    assert scale == 1 and output_final_state and q.shape == k.shape and q.shape[2] == v.shape[2]
    outs, states = [], []
    for i, (begin, end) in enumerate(itertools.pairwise([0, v.shape[1]] if cu_seqlens is None else cu_seqlens)):
        given = (x if x is None else x[:, begin:end].double() for x in (q, k, v, beta if beta is None else k, beta, g))
        state = initial_state if cu_seqlens is None else initial_state[i : i + 1]
        out, state = ops.RULES["fast-weight"].reference(
            *given, None, initial_state=state if state is None else state.double()
        )
        outs.append(out.to(v.dtype))
        states.append(state.float())
    return torch.cat(outs, 1), torch.cat(states)


@pytest.fixture(params=["functions", pytest.param("kernels", marks=pytest.mark.skipif(not RUNS, reason=NEEDS))])
def there(request, monkeypatch) -> None:
    """An installed package; Triton's interpreter lacks tensors from `range`, and benchmarks."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if request.param == "functions":
        for kind in ("simple_gla", "gla", "delta_rule", "kda", "gated_delta_rule"):
            monkeypatch.setitem(sys.modules, f"fla.ops.{kind}", SimpleNamespace(**{f"chunk_{kind}": function}))
        monkeypatch.setitem(sys.modules, "fla.ops", SimpleNamespace())
        monkeypatch.setitem(sys.modules, "fla", SimpleNamespace())
    elif INTERPRETED:
        from triton.runtime import autotuner, interpreter

        tensor = interpreter.interpreter_semantic.to_tensor
        monkeypatch.setattr(autotuner.Autotuner, "_bench", lambda *given, **options: [1.0] * 3)
        importlib.import_module("fla.ops")
        counted = lambda *given: map(tensor, builtins.range(*(int(tensor(x).handle.data.item()) for x in given)))  # noqa: E731
        for module in [x for name, x in sys.modules.items() if name.startswith("fla.ops.common.chunk")]:
            monkeypatch.setattr(module, "range", counted, raising=False)
    backends.say_again()


@pytest.mark.parametrize("starts", [None, [[0, 5, 6, 40], [1, 31, 64]]], ids=["one text", "documents"])
@pytest.mark.parametrize("rule", TAKEN, ids=lambda rule: rule.name)
def test_rules_have_the_outputs_and_gradients_of_the_definition(there, rule, starts):
    inputs = rule.inputs(B=2, T=70, H=2, K=16, V=16, dtype=torch.float16, regime=rule.regimes[0])
    exact, at = in_float64(inputs), {} if starts is None else {"starts": where(70, *starts)}
    outputs = rule.reference(exact | {name: x.cpu() for name, x in at.items()})
    expected = named(outputs, differentiate(outputs, exact, cotangents(outputs)))
    assert_close(outcome(rule, "fla", inputs, **at), expected, TOLERANCE[torch.float16])


@pytest.mark.parametrize("gate", [(), (16,)], ids=["head", "key"])
def test_shared_heads_and_the_whole_recurrence(there, gate):
    q, k, v = torch.rand(3, 1, 20, 4, 16).to(DEVICE).half().unbind(0)
    beta, decay = v[..., 0], -torch.rand(1, 20, 4, *gate).to(DEVICE).half()
    q, k = q[:, :, :2], k[:, :, :2] / 8
    for how in ({"beta": beta}, {"beta": beta, "erase": k}, {"erase": k}):
        pair = [ops.fast_weight_rule(q, k, v, **how, log_key_decay=decay, backend=x) for x in ("fla", "reference")]
        assert_close(named(pair[0]), named(pair[1]), TOLERANCE[torch.float16])


def test_a_layer_takes_it_for_sequences_and_not_for_steps(there, monkeypatch):
    layer, other = (GatedDelta(32, 2, key_dim=16, value_dim=16, backend=x).to(DEVICE).half() for x in ("fla", "auto"))
    other.load_state_dict(layer.state_dict())
    x = torch.randn(20, 2, 32, device=DEVICE).half()
    with torch.no_grad():
        (out, state), (expected, expected_state) = layer(x), other(x)
        monkeypatch.setattr("fairseq_fastweights.ops.fla.fast_weight_rule", None)
        steps = layer(x[:1], state)[0], other(x[:1], expected_state)[0]
    torch.testing.assert_close((out, steps[0]), (expected, steps[1]), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("name", "dtype", "said"),
    [
        ("decay", torch.float16, "flash-linear-attention has no log_value_decay"),
        ("two gates", torch.float16, "flash-linear-attention has no erase key beside k"),
        ("delta", torch.float32, "its kernels take torch.float16 and torch.bfloat16, not torch.float32"),
        ("sum", torch.float16, r"ModuleNotFoundError.*pip install flash-linear-attention"),
    ],
)
def test_refusals(there, monkeypatch, name, dtype, said):
    if "Module" in said:
        monkeypatch.setitem(sys.modules, "fla.ops", None)
    with pytest.raises(ops.BackendUnavailable, match=f"backend='fla' was asked for: .*{said}.*; or use backend='auto'"):
        RULE[name].run(RULE[name].inputs(dtype=dtype), "fla")
    own = replace(ops.RULES["sum"], name="own", kernel=None)
    with pytest.raises(ops.BackendUnavailable, match="flash-linear-attention has no own rule"):
        own(*torch.rand(3, 1, 5, 2, 4).to(DEVICE).half().unbind(0), backend="fla")
    if DEVICE.type == "cpu" and name == "sum":
        monkeypatch.delenv("TRITON_INTERPRET")
        with pytest.raises(ops.BackendUnavailable, match="run on devices of type cuda, not cpu"):
            RULE[name].run(RULE[name].inputs(dtype=dtype), "fla")
