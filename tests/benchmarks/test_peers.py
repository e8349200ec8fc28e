"""The peers get inputs in their own layout and do what they are compared with. Stand-ins with their signatures are used
where the packages are not: what is tested is how they are called."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from harness.cases import Shape, draw_inputs
from harness.contestants import Contestant, Unavailable, Work
from harness.peers import causal_product, flash_linear_attention, ours, softmax

from fairseq_fastweights import ops

SHAPE = Shape("tiny", 2, 3, 5, 4, 6, 2, "a test")
STEP = Shape("step", 2, 3, 1, 4, 6, 2, "a test")
# Other ways to the same sums, in float32.
SAME = 1e-5


def expected(rule: str, inputs: Any) -> torch.Tensor:
    operation = ours.OPERATIONS[rule]
    arguments = (inputs.q, inputs.k, inputs.v, *inputs.gates(rule))
    return operation(*arguments, initial_state=inputs.state, backend="reference")[0]


def check(contestant: Contestant, shape: Shape, tensors: int) -> Work:
    inputs = draw_inputs(shape, torch.float32, "cpu")
    work = contestant.prepare(shape, inputs)
    out = work.as_reference(work.run_forward())
    torch.testing.assert_close(out, expected(contestant.rule, inputs), rtol=SAME, atol=SAME)
    assert len(work.inputs) == tensors
    if not shape.steps:
        gradients = work.run_both()
        assert [g.shape for g in gradients] == [x.shape for x in work.inputs]
        assert all(x.is_contiguous() for x in (*work.inputs, work.d_out))
    return work


@pytest.mark.parametrize("shape", [SHAPE, STEP], ids=["segment", "step"])
@pytest.mark.parametrize("rule", ["sum", "gated", "decay", "delta"])
def test_our_backends_get_all_gates_and_the_state(rule: str, shape: Shape) -> None:
    [contestant] = [c for c in ours.contestants([rule]) if c.name == "chunkwise"]
    check(contestant, shape, {"sum": 3, "gated": 4, "decay": 5, "delta": 4}[rule])


def test_a_backend_that_is_not_there_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*arguments: Any, **options: Any) -> Any:
        raise ops.BackendUnavailable(f"build it with {causal_product.ROOT}/tools/build.py")

    monkeypatch.setitem(ours.OPERATIONS, "sum", unavailable)
    with pytest.raises(Unavailable, match=r"^build it with tools/build.py$"):
        ours.contestants(["sum"])[0].prepare(SHAPE, draw_inputs(SHAPE, torch.float32, "cpu")).run_both()


def test_attention_is_causal_and_as_wide_as_the_values() -> None:
    inputs = draw_inputs(SHAPE, torch.float32, "cpu")
    [contestant] = softmax.contestants()
    work = contestant.prepare(SHAPE, inputs)
    scores = torch.einsum("bthd,bshd->bhts", inputs.wide_q, inputs.wide_k) / 6**0.5
    weights = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf")).softmax(-1)
    out = torch.einsum("bhts,bshd->bthd", weights, inputs.v)
    torch.testing.assert_close(work.as_reference(work.run_forward()), out, rtol=SAME, atol=SAME)
    assert not contestant.same


STAND_IN = """
import torch
def causal_dot_product(q, k, v):
    assert all(x.is_contiguous() and x.shape[:3] == (2, 3, 5) for x in (q, k, v))
    return (q @ k.transpose(-1, -2)).tril() @ v
"""


def test_causal_product_is_found_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "fast_transformers"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "causal_product.py").write_text(STAND_IN)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("fast_transformers", "fast_transformers.causal_product"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    [contestant] = causal_product.contestants(tmp_path)
    try:
        check(contestant, SHAPE, 3)
        assert causal_product.build_record() is None
        (package / causal_product.BUILD_RECORD).write_text(json.dumps({"flags": ["-O3"]}))
        assert causal_product.build_record() == {"flags": ["-O3"]}
    finally:
        for name in ("fast_transformers", "fast_transformers.causal_product"):
            sys.modules.pop(name, None)


def test_causal_product_is_optional(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "fast_transformers", None)  # importing it fails
    [contestant] = causal_product.contestants(tmp_path)
    with pytest.raises(Unavailable, match=r"build_causal_product.py builds it"):
        contestant.prepare(SHAPE, draw_inputs(SHAPE, torch.float32, "cpu"))
    assert causal_product.build_record() is None


def fla_linear_attn(q: Any, k: Any, v: Any, scale: Any = None, initial_state: Any = None,
                    output_final_state: bool = False, normalize: bool = True) -> Any:  # fmt: skip
    assert scale == 1.0 and not normalize
    return ops.sum_rule(q, k, v, initial_state=initial_state)


def fla_gla(q: Any, k: Any, v: Any, gk: Any = None, gv: Any = None, scale: Any = None, initial_state: Any = None,
            output_final_state: bool = False) -> Any:  # fmt: skip
    assert scale == 1.0
    return ops.decay_rule(q, k, v, gk, gv, initial_state=initial_state)


def fla_simple_gla(q: Any, k: Any, v: Any, g: Any = None, scale: Any = None, initial_state: Any = None,
                   output_final_state: bool = False) -> Any:  # fmt: skip
    gk = None if g is None else g.unsqueeze(-1).expand_as(k)
    return fla_gla(q, k, v, gk, None, scale, initial_state, output_final_state)


def fla_delta_rule(q: Any, k: Any, v: Any, beta: Any, scale: Any = None, initial_state: Any = None,
                   output_final_state: bool = False) -> Any:  # fmt: skip
    assert scale == 1.0
    return ops.delta_rule(q, k, v, beta, initial_state=initial_state)


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions with flash-linear-attention's signatures that follow its equations."""
    functions = {
        "linear_attn": fla_linear_attn,
        "gla": fla_gla,
        "simple_gla": fla_simple_gla,
        "delta_rule": fla_delta_rule,
        "retention": fla_simple_gla,
    }
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, function in functions.items():
        module = ModuleType(f"fla.ops.{name}")
        for form in ("chunk", "fused_recurrent"):
            setattr(module, f"{form}_{name}", function)
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize("shape", [SHAPE, STEP], ids=["segment", "step"])
def test_flash_linear_attention_is_called_for_our_rules(fla: None, shape: Shape) -> None:
    contestants = flash_linear_attention.contestants(["sum", "gated", "decay", "delta"])
    assert len(contestants) == 10
    gates = {"sum": 3, "gated": 4, "decay": 5, "delta": 4}
    for contestant in contestants:
        if contestant.same:
            check(contestant, shape, gates[contestant.rule])
    others = {c.name: len(c.prepare(shape, draw_inputs(shape, torch.float32, "cpu")).inputs)
              for c in contestants if not c.same}  # fmt: skip
    assert others == {"fla chunk_gla": 4, "fla chunk_retention": 3, "fla fused_recurrent_retention": 3}


def test_flash_linear_attention_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    contestant = flash_linear_attention.contestants(["sum"])[0]
    with pytest.raises(Unavailable, match="ModuleNotFoundError"):
        contestant.prepare(SHAPE, draw_inputs(SHAPE, torch.float32, "cpu"))
