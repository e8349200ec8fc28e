"""What is asked of kernels on a GPU, asked of those for the CPU: that the programs run, and that they can fail."""

import json

import gpu_exercise
import pytest
import torch

from fairseq_fastweights import ops


@pytest.fixture(autouse=True)
def native() -> None:
    if ops.chosen_backend("cpu", torch.float32, 1) != "native":
        pytest.skip("the CPU kernels are not built here")


@pytest.mark.parametrize("program", ["memory", "determinism", "first-call"])
def test_passes_on_the_cpu(program: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(gpu_exercise, "MOST_EXTRA_MILLISECONDS", 60_000)  # other tests run beside this one
    assert gpu_exercise.main([program, "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["right"] is True


def test_bits_that_change_are_found(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    exact = gpu_exercise.differentiated
    monkeypatch.setattr(
        gpu_exercise, "differentiated", lambda *arguments: [x + torch.rand(()) for x in exact(*arguments)]
    )
    assert gpu_exercise.main(["determinism", "--device", "cpu"]) == 1
    assert len(json.loads(capsys.readouterr().out)["differing"]) == 2 * 2 * len(gpu_exercise.SMALL_SHAPES) * 4
