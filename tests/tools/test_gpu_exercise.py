"""The programs for kernels on a GPU, with those for the CPU: they run, and they can fail."""

import json
import os

import gpu_exercise
import pytest
import torch

from fairseq_fastweights import ops


@pytest.mark.parametrize(("program", "status"), [("memory", 0), ("determinism", 1)])
def test_calls_every_operator_by_each_algorithm_and_finds_bits_that_change(
    program, status, monkeypatch, capsys
) -> None:
    if ops.chosen_backend("cpu", torch.float32, 1) != "native":
        pytest.skip("the CPU kernels are not built here")
    asked: list[tuple[str, torch.dtype]] = []
    words, exact = [program, "--device", "cpu"], gpu_exercise.differentiated

    def differentiated(rule: gpu_exercise.Rule, inputs: list[torch.Tensor], state: torch.Tensor) -> list[torch.Tensor]:
        asked.append((os.environ["FASTWEIGHTS_CUDA_ALGORITHM"], inputs[0].dtype))
        return [x + torch.rand(()) for x in exact(rule, inputs, state)]

    assert gpu_exercise.main(words) == 0 and capsys.readouterr().out == "[]\n"
    monkeypatch.setattr(gpu_exercise, "differentiated", differentiated)
    dtypes = gpu_exercise.DTYPES if program == "memory" else gpu_exercise.DTYPES[:3]
    calls = 2 * len(dtypes) * len(gpu_exercise.SMALL_SHAPES) * len(gpu_exercise.RULES)
    assert gpu_exercise.main(words) == status and len(asked) == calls * (1 + status)
    assert set(asked) == {(algorithm, dtype) for algorithm in ("recurrent", "chunked") for dtype in dtypes}
    assert "FASTWEIGHTS_CUDA_ALGORITHM" not in os.environ
    assert len(json.loads(capsys.readouterr().out)) == calls * status
    asked.clear()
    assert gpu_exercise.main([*words, "--share", "2/5"]) == status
    assert len(asked) == len(range(1, calls, 5)) * (1 + status)
