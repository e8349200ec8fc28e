"""Contestants get inputs in their own layout and do what they are compared with."""

import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from harness import contestants
from harness.cases import RULES, Shape, draw_inputs
from harness.contestants import Contestant, Refusal

SEGMENT, STEP = Shape("tiny", 2, 3, 5, 4, 6, 2), Shape("step", 2, 3, 1, 4, 6, 2)


def check(contestant: Contestant, shape: Shape) -> None:
    inputs, rule = draw_inputs(shape, torch.float32, "cpu"), contestant.rule
    work = contestant.prepare(shape, inputs)
    arguments = (inputs.q, inputs.k, inputs.v, *inputs.gates[rule])
    expected, _ = RULES[rule](*arguments, initial_state=inputs.state, backend="reference")
    # Other ways to the same sums, in float32.
    torch.testing.assert_close(work.as_reference(work.run_forward()), expected, rtol=1e-5, atol=1e-5)
    assert len(work.inputs) == 3 + len(RULES[rule].gates)
    if not shape.steps:
        assert [g.shape for g in work.run_both()] == [x.shape for x in work.inputs]
        assert all(x.is_contiguous() for x in (*work.inputs, work.d_out))


@pytest.mark.parametrize("shape", [SEGMENT, STEP])
@pytest.mark.parametrize("rule", RULES)
def test_our_backends_get_all_gates_and_the_state(rule: str, shape: Shape) -> None:
    check(contestants.all_contestants([rule], "cpu")[0], shape)


STAND_IN = """
def causal_dot_product(q, k, v):
    assert all(x.is_contiguous() and x.shape[:3] == (2, 3, 5) for x in (q, k, v))
    return (q @ k.transpose(-1, -2)).tril() @ v
"""


def test_peers_are_optional_and_causal_product_is_found_in_its_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(contestants, "PEERS", tmp_path)
    peer, fla = contestants.all_contestants(["sum"], "cpu")[-1], contestants.all_contestants(["sum"], "cuda")[-1]
    with mock.patch.dict(sys.modules, fla=None):  # importing that fails
        for contestant, message in ((peer, "build_causal_product.py was not run"), (fla, "ModuleNotFoundError")):
            with pytest.raises(Refusal, match=message):
                contestant.prepare(SEGMENT, draw_inputs(SEGMENT, torch.float32, "cpu"))
        (tmp_path / "fast_transformers").mkdir()
        (tmp_path / "fast_transformers" / "causal_product.py").write_text(STAND_IN)
        check(peer, SEGMENT)
