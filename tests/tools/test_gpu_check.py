"""The stages of a GPU session run one after the other, whatever becomes of each; its programs, with CPU kernels."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import gpu_check
import gpu_exercise
import pytest
import torch
from gpu_check import Stage

from fairseq_fastweights import ops

ROOT = Path(__file__).resolve().parents[2]


def python(name: str, program: str, limit: float = 300) -> Stage:
    return Stage(name, [sys.executable, "-S", "-c", program], limit)


def test_a_stage_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path, monkeypatch) -> None:
    read, write = os.pipe()  # held open by what the stage starts
    os.set_inheritable(write, True)
    wait, popen = subprocess.Popen.wait, subprocess.Popen
    monkeypatch.setattr(gpu_check.subprocess, "Popen", lambda *args, **more: popen(*args, **more, close_fds=False))

    def time_is_up(process: subprocess.Popen, timeout: float | None = None) -> int:
        if timeout is None:
            return wait(process)
        assert os.read(read, 1) == b"x"
        raise subprocess.TimeoutExpired("slow", timeout)

    monkeypatch.setattr(popen, "wait", time_is_up)
    start = f"import os, time; os.fork() or os.write({write}, b'x'); time.sleep(600)"
    assert gpu_check.run(python("slow", start, limit=1), 30, tmp_path / "log")["status"] == "timed out"
    os.close(write)
    assert select.select([read], [], [], 60)[0] and os.read(read, 1) == b""  # once all that had it are gone
    os.close(read)


def test_a_failing_stage_stops_no_other_and_results_are_kept(tmp_path: Path, monkeypatch, capsys) -> None:
    results = tmp_path / "nvidia-h100.json"
    results.write_text(json.dumps({"other": 1, "gpu check": {"first": "old", "build": {"status": "passed"}}}))
    failing = python("first", "print('what went wrong'); print('the end'); raise SystemExit(3)")
    stages = [failing, python("second", "print('all is well')"), Stage("absent", ["no-such-sanitizer"], 30)]
    for name, value in (("WORK", tmp_path / "work"), ("RESULTS", tmp_path), ("ROOT", tmp_path)):
        monkeypatch.setattr(gpu_check, name, value)
    monkeypatch.setattr(gpu_check, "device_name", lambda: "nvidia-h100")
    monkeypatch.setattr(gpu_check, "stages", lambda device: stages)
    assert gpu_check.main([]) == 1
    printed = capsys.readouterr().out
    assert "what went wrong" in printed and "3 stages, not passed: first, absent" in printed
    found = json.loads(results.read_text())
    assert found["other"] == 1
    assert [(name, stage["status"], stage.get("summary")) for name, stage in found["gpu check"].items()] == [
        *(("first", "failed", "the end"), ("build", "passed", None), ("second", "passed", "all is well")),
        ("absent", "failed", "no-such-sanitizer is not on PATH"),
    ]
    for words, status, says in (("second", 0, "1 stages, all passed"), ("--minutes 0 second", 1, "no time was left")):
        assert gpu_check.main(words.split()) == status and says in capsys.readouterr().out
    with pytest.raises(SystemExit):
        gpu_check.main(["first", "c"])
    assert "there is no stage c; there are first; second; absent" in capsys.readouterr().err


def test_the_plan_names_existing_programs_and_each_sanitizer_tool(monkeypatch) -> None:
    plan = {stage.name: stage for stage in gpu_check.stages("gpu")}
    named = [word for stage in plan.values() for word in stage.command if word.endswith(".py")]
    assert named and all((ROOT / name).is_file() for name in named)
    assert plan["build"].environment == {"FASTWEIGHTS_BUILD": "cuda", "TORCH_CUDA_ARCH_LIST": ""}
    for tool in ("memcheck", "racecheck", "synccheck", "initcheck"):
        assert f"--error-exitcode 86 --print-limit 20 --tool {tool} {sys.executable}" in " ".join(plan[tool].command)
        # Else memory that torch keeps for other tensors would count as this one's, and as written.
        assert plan[tool].environment == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    result = subprocess.CompletedProcess([], 0, "NVIDIA H100 80GB\n", "AssertionError: Torch without CUDA\n")
    monkeypatch.setattr(gpu_check.subprocess, "run", lambda *a, **k: result)
    assert gpu_check.device_name() == "nvidia-h100-80gb"
    result.returncode = 1
    with pytest.raises(SystemExit, match=r"finds no GPU \(AssertionError: Torch without CUDA\); .* `make PYTHON="):
        gpu_check.main([])


@pytest.mark.parametrize(("program", "status"), [("memory", 0), ("determinism", 1)])
def test_calls_every_operator_by_each_algorithm_and_finds_bits_that_change(
    program, status, monkeypatch, capsys
) -> None:
    if ops.chosen_backend("cpu", torch.float32, 1) != "native":
        pytest.skip("the CPU kernels are not built here")
    asked: list[tuple[str, torch.dtype]] = []
    words, exact = [program, "--device", "cpu"], gpu_exercise.differentiated

    def differentiated(rule: object, inputs: list[torch.Tensor], state: torch.Tensor) -> list[torch.Tensor]:
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
