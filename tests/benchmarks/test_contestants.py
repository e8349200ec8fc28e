"""Contestants get inputs in their own layout and do what they are compared with."""

import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from harness import contestants
from harness.cases import RULES, Shape, draw_inputs
from harness.contestants import Contestant, Refusal

SHAPES = {"segment": Shape("tiny", 2, 3, 5, 4, 6, 2), "step": Shape("step", 2, 3, 1, 4, 6, 2)}
INPUTS = {name: draw_inputs(shape, torch.float32, "cpu") for name, shape in SHAPES.items()}


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)  # other ways to the same sums, in float32


def check(contestant: Contestant, length: str) -> None:
    shape, inputs, rule = SHAPES[length], INPUTS[length], contestant.rule
    work = contestant.prepare(shape, inputs)
    arguments = (inputs.q, inputs.k, inputs.v, *inputs.gates[rule])
    expected, _ = RULES[rule](*arguments, initial_state=inputs.state, backend="reference")
    same(work.as_reference(work.run_forward()), expected)
    assert len(work.inputs) == 3 + len(RULES[rule].gates)
    if not shape.steps:
        assert [g.shape for g in work.run_both()] == [x.shape for x in work.inputs]
        assert all(x.is_contiguous() for x in (*work.inputs, work.d_out))


def contestants_on(device: str, name: str, *rules: str) -> list[Contestant]:
    """The contestants whose names begin so."""
    return [one for one in contestants.all_contestants(rules, device) if one.name.startswith(name)]


@pytest.mark.parametrize("length", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_our_backends_get_all_gates_and_the_state(rule: str, length: str) -> None:
    [contestant] = contestants_on("cpu", "chunkwise", rule)
    check(contestant, length)


STAND_IN = """
def causal_dot_product(q, k, v):
    assert all(x.is_contiguous() and x.shape[:3] == (2, 3, 5) for x in (q, k, v))
    return (q @ k.transpose(-1, -2)).tril() @ v
"""


def test_peers_are_optional_and_causal_product_is_found_in_its_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(contestants, "PEERS", tmp_path)
    monkeypatch.setitem(sys.modules, "fla", None)  # importing it fails
    [peer], [fla, _] = contestants_on("cpu", "causal_product", "sum"), contestants_on("cuda", "fla", "sum")
    for contestant, message in ((peer, "build_causal_product.py was not run"), (fla, "ModuleNotFoundError")):
        with pytest.raises(Refusal, match=message):
            contestant.prepare(SHAPES["segment"], INPUTS["segment"])
    (tmp_path / "fast_transformers").mkdir()
    (tmp_path / "fast_transformers" / "causal_product.py").write_text(STAND_IN)
    with mock.patch.dict(sys.modules):  # without it again at the end
        check(peer, "segment")
