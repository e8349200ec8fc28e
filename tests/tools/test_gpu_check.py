"""The stages of a GPU session run one after the other, whatever becomes of each, and their results are kept."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import gpu_check
import pytest
from gpu_check import Stage

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "WORK", tmp_path / "work")
    monkeypatch.setattr(gpu_check, "RESULTS", tmp_path / "results")


def python(name: str, program: str, limit: float = 30) -> Stage:
    return Stage(name, [sys.executable, "-c", program], limit)


def test_a_stage_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    program = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    for limit in (1, 4, 16):  # on a busy machine a process may take seconds to begin
        outcome = gpu_check.run(python("slow", program, limit=limit), 30, tmp_path / "log")
        assert outcome["status"] == "timed out" and outcome["seconds"] < limit + 20
        if outcome["summary"]:
            break
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # until its new parent has seen its end
            os.kill(int(outcome["summary"]), 0)
            time.sleep(0.05)


def test_a_failing_stage_does_not_stop_the_others_and_results_that_were_there_are_kept(tmp_path: Path, capsys) -> None:
    results = tmp_path / "gpu.json"
    results.write_text(json.dumps({"other": 1, "gpu check": {"first": "old", "build": {"status": "passed"}}}))
    stages = [
        python("first", "print('what went wrong'); print('the end'); exit(3)"),
        python("second", "print('all is well')"),
        Stage("absent", ["no-such-sanitizer"], 30),
    ]
    assert gpu_check.check(stages, results, 60) == ["first", "absent"]
    assert "what went wrong" in capsys.readouterr().out
    found = json.loads(results.read_text())
    assert found["other"] == 1
    assert [(name, stage["status"], stage.get("summary")) for name, stage in found["gpu check"].items()] == [
        *(("first", "failed", "the end"), ("build", "passed", None), ("second", "passed", "all is well")),
        ("absent", "failed", "no-such-sanitizer is not on PATH"),
    ]


def test_the_exit_status_tells(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(gpu_check, "ROOT", gpu_check.RESULTS.parent)
    monkeypatch.setattr(gpu_check, "device_name", lambda: "nvidia-h100")
    monkeypatch.setattr(gpu_check, "stages", lambda device: [python("a", "exit(0)"), python("b", "exit(1)")])
    for arguments, status, says in (
        (["a"], 0, "1 stages, all passed"),
        ([], 1, "not passed: b"),
        (["--minutes", "0", "a"], 1, "no time was left"),
    ):
        assert gpu_check.main(arguments) == status and says in capsys.readouterr().out
    assert [path.name for path in gpu_check.RESULTS.iterdir()] == ["nvidia-h100.json"]
    with pytest.raises(SystemExit):
        gpu_check.main(["a", "c"])
    assert "there is no stage c; there are a; b" in capsys.readouterr().err


def test_the_plan_names_programs_that_there_are_and_each_tool_of_the_sanitizer() -> None:
    plan = {stage.name: stage for stage in gpu_check.stages("gpu")}
    named = [word for stage in plan.values() for word in stage.command if word.endswith(".py")]
    assert named and all((ROOT / name).is_file() for name in named)
    # The CUDA kernels take up to 20 minutes of one core, and a machine may have no more.
    assert plan["build"].limit > 20 * 60
    assert plan["build"].environment == {"FASTWEIGHTS_BUILD": "cuda", "TORCH_CUDA_ARCH_LIST": ""}
    for tool in ("memcheck", "racecheck", "synccheck", "initcheck"):
        words = " ".join(plan[tool].command)
        assert f"--error-exitcode 86 --print-limit 20 --tool {tool} {sys.executable} tools/gpu_exercise.py mem" in words
        # Else memory that torch keeps for other tensors would count as this one's, and as written.
        assert plan[tool].environment == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for name in ("kernels", "training"):
        assert plan[name].command[-1].endswith(f"results/gpu-{name}.json")


@pytest.mark.parametrize(("said", "code", "expected"), [("NVIDIA H100 80GB", 0, "nvidia-h100-80gb"), ("", 1, None)])
def test_the_gpu_has_a_name_or_what_torch_says_of_it(said: str, code: int, expected: str | None, monkeypatch) -> None:
    result = subprocess.CompletedProcess([], code, f"{said}\n", "Traceback\nAssertionError: Torch without CUDA\n")
    monkeypatch.setattr(gpu_check.subprocess, "run", lambda *a, **k: result)
    if expected:
        assert gpu_check.device_name() == expected
    else:
        with pytest.raises(SystemExit, match=r"finds no GPU \(AssertionError: Torch without CUDA\); .* `make PYTHON="):
            gpu_check.main([])
