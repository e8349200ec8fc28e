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

from fairseq_fastweights import env

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "WORK", tmp_path / "work")
    monkeypatch.setattr(gpu_check, "RESULTS", tmp_path / "results")
    monkeypatch.delenv("OUT", raising=False)


def python(name: str, program: str, limit: float = 30, **options: object) -> Stage:
    return Stage(name, [sys.executable, "-c", program], limit, **options)


def test_a_stage_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    program = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    outcome = gpu_check.run(python("slow", program, limit=1), 30, tmp_path / "log")
    assert outcome["status"] == "timed out" and outcome["seconds"] < 20
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # until its new parent has seen its end
            os.kill(outcome["found"], 0)
            time.sleep(0.05)


def test_a_failing_stage_does_not_stop_the_others_and_results_that_were_there_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    results, written, out = tmp_path / "results" / "gpu.json", tmp_path / "rows.json", tmp_path / "out"
    for folder in (results.parent, out):
        folder.mkdir()
    monkeypatch.setenv("OUT", str(out))
    old = {"never": "yesterday", "other": 1, "gpu check": {"first": "old", "build": {"status": "passed"}}}
    results.write_text(json.dumps(old))
    stale = tmp_path / "never.json"
    stale.write_text("[]")  # of an earlier run: not what this one found
    stages = [
        python("first", "print('what went wrong'); print('FAILED tests/a.py'); print('the end'); exit(3)"),
        python("second", "print('{\"right\": true}')"),
        python("rows", f"import json, sys; json.dump(sys.argv[1:], open({str(written)!r}, 'w'))", output=written),
        python("never", "exit(1)", output=stale),
        Stage("absent", ["no-such-sanitizer"], 30),
    ]
    assert gpu_check.check(stages, results, 60) == ["first", "never", "absent"]
    assert "what went wrong" in capsys.readouterr().out and "what went wrong" in (out / "gpu-check.log").read_text()
    found = json.loads(results.read_text())
    assert found == json.loads((out / "gpu.json").read_text())
    assert (found["never"], found["other"]) == ("yesterday", 1)
    # What it may take in all is told to the program that measures.
    assert found["rows"][0] == "--budget" and 1 <= float(found["rows"][1]) <= 10
    checked = found["gpu check"]
    assert list(checked) == ["first", "build", "second", "rows", "never", "absent"]
    assert checked["build"] == {"status": "passed"}
    assert (checked["first"]["summary"], checked["first"]["failures"]) == ("the end", ["FAILED tests/a.py"])
    assert checked["second"]["found"] == {"right": True} and "not on PATH" in checked["absent"]["summary"]


def test_the_exit_status_tells(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(gpu_check, "ROOT", gpu_check.RESULTS.parent)
    monkeypatch.setattr(gpu_check, "device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(gpu_check, "stages", lambda: [python("a", "exit(0)"), python("b", "exit(1)")])
    for arguments, status, says in (
        (["a"], 0, "all passed"),
        ([], 1, "not passed: b"),
        (["--minutes", "0", "a"], 1, "no time was left"),
    ):
        assert gpu_check.main(arguments) == status and says in capsys.readouterr().out
    assert [path.name for path in gpu_check.RESULTS.iterdir()] == ["nvidia-h100-80gb-hbm3.json"]
    with pytest.raises(SystemExit):
        gpu_check.main(["a", "c"])
    assert "there is no stage c; there are a; b" in capsys.readouterr().err


def test_the_plan_names_programs_that_there_are_and_each_tool_of_the_sanitizer(monkeypatch, capsys) -> None:
    plan = {stage.name: stage for stage in gpu_check.stages()}
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
    assert [name for name, stage in plan.items() if stage.output] == [list(plan)[-1]] == ["kernels"]
    monkeypatch.setattr(gpu_check.subprocess, "Popen", lambda *a, **k: pytest.fail("it ran something"))
    assert gpu_check.main(["--dry-run"]) == 0
    assert all(f"{name} " in listed for name, listed in zip(plan, capsys.readouterr().out.splitlines(), strict=True))


@pytest.mark.parametrize(
    ("cuda", "code", "says"),
    [
        (None, 0, r"torch 2\.13\.0 has no CUDA"),
        ("13.0", 0, r"torch 2\.13\.0 sees no GPU"),
        (None, 1, "cannot import torch .*make PYTHON="),
    ],
)
def test_without_a_gpu_it_says_so(cuda: str | None, code: int, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = env.report()
    assert {"torch", "CUDA of torch"} <= set(found["versions"])
    found |= {"gpus": [], "versions": {"torch": "2.13.0", "CUDA of torch": cuda}}
    result = subprocess.CompletedProcess([], code, f"{json.dumps(found)}\n", "ModuleNotFoundError: torch")
    monkeypatch.setattr(gpu_check.subprocess, "run", lambda *a, **k: result)
    with pytest.raises(SystemExit, match=says):
        gpu_check.main([])
