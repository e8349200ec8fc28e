"""The stages of a GPU session run one after the other, whatever becomes of each, and their results are kept."""

import json
import os
import signal
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
    monkeypatch.delenv("OUT", raising=False)


def python(name: str, program: str, limit: float = 30, **options: object) -> Stage:
    return Stage(name, [sys.executable, "-c", program], limit, **options)


def test_a_stage_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, time\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    outcome = gpu_check.run(python("slow", program, limit=2), 30, tmp_path / "log")
    assert outcome["status"] == "timed out" and outcome["seconds"] < 20
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # until its new parent has seen its end
            os.kill(outcome["found"], 0)
            time.sleep(0.05)
        os.kill(outcome["found"], signal.SIGKILL)


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
    statuses = gpu_check.check(stages, results, 60)
    assert list(statuses.values()) == ["failed", "passed", "passed", "failed", "failed"]
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
    ("printed", "code", "says"),
    [
        ('["2.13.0+cpu", null, false]', 0, r"torch 2\.13\.0\+cpu has no CUDA"),
        ('["2.11.0+cu130", "13.0", false]', 0, r"torch 2\.11\.0\+cu130 sees no GPU"),
        ("", 1, "cannot import torch .*make PYTHON="),
    ],
)
def test_without_a_gpu_it_says_so(printed: str, code: int, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = subprocess.CompletedProcess([], code, stdout=f"{printed}\n", stderr="ModuleNotFoundError: torch")
    monkeypatch.setattr(gpu_check.subprocess, "run", lambda *a, **k: result)
    with pytest.raises(SystemExit, match=says):
        gpu_check.main([])
