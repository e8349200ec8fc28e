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


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "WORK", tmp_path / "work")
    monkeypatch.setattr(gpu_check, "RESULTS", tmp_path / "results")
    monkeypatch.delenv("OUT", raising=False)


def python(name: str, program: str, limit: float = 30, **options: object) -> Stage:
    return Stage(name, [sys.executable, "-c", program], limit, **options)


class TestRun:
    @pytest.mark.parametrize(("code", "status"), [(0, "passed"), (3, "failed")])
    def test_the_exit_status_decides(self, tmp_path: Path, code: int, status: str) -> None:
        outcome = gpu_check.run(python("a", f"print('first'); print('last'); exit({code})"), 30, tmp_path / "log")
        assert (outcome.status, outcome.summary) == (status, "last")
        assert "first" in (tmp_path / "log").read_text()

    def test_a_stage_that_takes_too_long_is_ended_with_all_that_it_started(self, tmp_path: Path) -> None:
        program = (
            "import subprocess, sys, time\n"
            "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid, flush=True)\n"
            "time.sleep(60)\n"
        )
        started = time.monotonic()
        outcome = gpu_check.run(python("slow", program, limit=2), 30, tmp_path / "log")
        assert outcome.status == "timed out" and time.monotonic() - started < 20
        with pytest.raises(ProcessLookupError):
            for _ in range(100):  # until its new parent has seen its end
                os.kill(int(outcome.summary), 0)
                time.sleep(0.05)
            os.kill(int(outcome.summary), signal.SIGKILL)


class TestCheck:
    def test_a_failing_stage_does_not_stop_the_others(self, tmp_path: Path, capsys) -> None:
        written = tmp_path / "rows.json"
        stages = [
            python("first", "print('what went wrong'); exit(1)"),
            python("second", "print('{\"right\": true}')"),
            python("rows", f"open({str(written)!r}, 'w').write('[1, 2]')", output=written),
        ]
        results = tmp_path / "results" / "gpu.json"
        outcomes = gpu_check.check(stages, results, 60)
        assert [outcome.status for outcome in outcomes] == ["failed", "passed", "passed"]
        assert "what went wrong" in capsys.readouterr().out
        found = json.loads(results.read_text())
        first, second, third = found["gpu check"]["stages"]
        assert first["summary"] == "what went wrong" and second["found"] == {"right": True}
        assert third["name"] == "rows" and found["rows"] == [1, 2]

    def test_results_that_were_there_are_kept(self, tmp_path: Path) -> None:
        results = tmp_path / "gpu.json"
        results.write_text('{"kernels": {"date": "yesterday"}, "other": 1, "gpu check": {"stages": ["old"]}}')
        never = tmp_path / "never.json"
        never.write_text("[]")  # of an earlier run: not what this one found
        gpu_check.check([python("kernels", "exit(1)", output=never)], results, 60)
        found = json.loads(results.read_text())
        assert found["kernels"] == {"date": "yesterday"} and found["other"] == 1
        assert [stage["name"] for stage in found["gpu check"]["stages"]] == ["kernels"]

    def test_the_exit_status_tells(self, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
        monkeypatch.setattr(gpu_check, "ROOT", gpu_check.RESULTS.parent)
        monkeypatch.setattr(gpu_check, "device_name", lambda: "NVIDIA H100 80GB HBM3")
        monkeypatch.setattr(gpu_check, "stages", lambda: [python("a", "exit(0)")])
        assert gpu_check.main([]) == 0
        monkeypatch.setattr(gpu_check, "stages", lambda: [python("a", "exit(0)"), python("b", "exit(1)")])
        assert gpu_check.main([]) == 1
        assert "not passed: b" in capsys.readouterr().out
        assert [path.name for path in gpu_check.RESULTS.iterdir()] == ["nvidia-h100-80gb-hbm3.json"]


class TestPlan:
    def test_benchmarks_have_a_minute_even_if_all_else_takes_its_limit(self) -> None:
        plan = gpu_check.stages()
        assert [stage.name for stage in plan if stage.budgeted] == [plan[-1].name]
        assert 60 * 8.75 - sum(stage.limit for stage in plan[:-1]) >= 60

    def test_names_programs_that_there_are(self) -> None:
        root = Path(__file__).resolve().parents[2]
        named = [word for stage in gpu_check.stages() for word in stage.command if word.endswith(".py")]
        assert named and all((root / name).is_file() for name in named)

    def test_a_dry_run_lists_the_stages_and_runs_nothing(self, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
        monkeypatch.setattr(gpu_check.subprocess, "Popen", lambda *a, **k: pytest.fail("it ran something"))
        assert gpu_check.main(["--dry-run"]) == 0
        listed = capsys.readouterr().out
        assert all(f"{stage.name} " in listed for stage in gpu_check.stages())

    @pytest.mark.parametrize(
        ("printed", "code", "says"),
        [
            ('["2.13.0+cpu", null, false]', 0, r"torch 2\.13\.0\+cpu has no CUDA"),
            ('["2.11.0+cu130", "13.0", false]', 0, r"torch 2\.11\.0\+cu130 sees no GPU"),
            ("", 1, "cannot import torch .*make PYTHON="),
        ],
    )
    def test_without_a_gpu_it_says_so(
        self, printed: str, code: int, says: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        result = subprocess.CompletedProcess([], code, stdout=f"{printed}\n", stderr="ModuleNotFoundError: torch")
        monkeypatch.setattr(gpu_check.subprocess, "run", lambda *a, **k: result)
        with pytest.raises(SystemExit, match=says):
            gpu_check.main([])
