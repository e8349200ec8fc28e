"""Tools that run checks: records of passes, trainings with faults, fairseq's own tests, a GPU's stages."""

import json
import os
import re
import select
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import faults
import gpu_check
import gpu_exercise
import pytest
import recorded_passes
import tests_of_fairseq
import torch
from gpu_check import Stage
from native_toolchain import HostCompiler, Unavailable
from recorded_passes import Check

from fairseq_fastweights import ops
from tests.conftest import ROOT, import_plugin

WORDS = "import pathlib, sys; pathlib.Path('ran').touch(); sys.exit(int(pathlib.Path('status').read_text()))"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two checks; the first ends with the number in the file `status`."""
    checks = {"emulated": Check(("cuda/*.cu", "cuda/**/*.h"), ("-c", WORDS)), "other": Check(("status",), ("-c", ""))}
    monkeypatch.setattr(recorded_passes, "CHECKS", checks)
    monkeypatch.setattr(HostCompiler, "find", lambda: None)
    monkeypatch.delenv("CI", raising=False)
    sources = dict.fromkeys(("cuda/step.cu", "cuda/choice.cu", "cuda/part/old.h"), "a")
    return write(tmp_path, {**sources, "tests/x": "", "status": "0"})


def ran(root: Path, *arguments: str, status: int = 0) -> bool:
    assert recorded_passes.main([*arguments, "emulated"], root) == status
    found = (root / "ran").exists()
    (root / "ran").unlink(missing_ok=True)
    return found


def test_a_check_is_left_out_while_its_files_are_those_that_passed(root: Path, capsys) -> None:
    recorded_passes.main(["other"], root)
    assert ran(root, "--changed") and not ran(root, "--changed")
    assert "emulated: left out" in capsys.readouterr().out and ran(root), "it was asked for"
    step, other = root / "cuda/step.cu", root / "cuda/stop.cu"
    for change in (lambda: step.write_text("b\n"), lambda: step.rename(other), other.unlink):
        change()
        assert ran(root, "--changed") and not ran(root, "--changed")
    record = root / recorded_passes.RECORD
    assert sorted(json.loads(record.read_text())) == ["emulated", "other"]
    for text in ("{", "[]", '{"another": ""}'):
        record.write_text(text)
        assert not ran(root, "--changed", status=1)
        assert "tests/recorded_passes.json is damaged" in capsys.readouterr().err
    (root / "cuda/part/old.h").unlink()
    assert not ran(root, status=1) and "no file is called cuda/**/*.h any more" in capsys.readouterr().err


def test_failures_and_checks_that_cannot_run_are_not_recorded(root: Path, monkeypatch) -> None:
    (root / "status").write_text("5")
    assert ran(root, status=5) and ran(root, "--changed", status=5)
    (root / "status").write_text("0")
    unavailable = Mock(side_effect=Unavailable("no compiler"))
    monkeypatch.setitem(
        recorded_passes.CHECKS, "emulated", recorded_passes.CHECKS["emulated"]._replace(prepare=unavailable)
    )
    assert not ran(root, status=0)
    monkeypatch.setenv("CI", "true")
    assert not ran(root, status=1)
    monkeypatch.setattr(HostCompiler, "find", unavailable)
    assert not ran(root, status=1) and not (root / recorded_passes.RECORD).exists()


@pytest.mark.slow
def test_trainings_survive_every_fault_as_the_page_says(capsys, tmp_path, monkeypatch):
    import_plugin()
    monkeypatch.setattr(faults.tempfile, "tempdir", str(tmp_path))  # where the folder is, if none is given
    assert faults.main(["--count", "1"]) == 0
    rows = re.findall(r"^\| (.+) \| 1 \| 1 \| (\d+) \|$", capsys.readouterr().out, re.MULTILINE)
    assert [title for title, _ in rows] == [fault.title for fault in faults.FAULTS.values()]
    assert all(int(lost) <= faults.INTERVAL for _, lost in rows)


def test_trainings_that_differ_are_told_apart():
    one, same = ({"a": [faults.torch.ones(2)], "b": 1} for _ in range(2))
    assert not faults.differences(one, same)
    for other in (one | {"b": 1.0}, one | {"a": [faults.torch.ones(2).double()]}, {"a": []}):
        assert len(faults.differences(one, other)) == 1


def test_unexpected_outcomes_of_fairseqs_tests_are_named(tmp_path: Path) -> None:
    fails = "def test_it(): assert False\n"
    files = {"test_a.py": fails, "gpu/test_b.py": fails, "test_c.py": "import no_such", "test_d.py": "import scripts.d"}
    listed = "class TestLanguageModeling:\n    def test_transformer_xl_bptt_lm(self): assert False\n"
    files["test_binaries.py"] = f"class TestTranslation:\n    def test_insertion_transformer(self): pass\n{listed}"
    write(tmp_path / "tests", {**files, "__init__.py": "", "../scripts/d.py": ""})
    command = [sys.executable, tests_of_fairseq.__file__, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True)
    found = re.findall(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
    passed = "tests/test_binaries.py::TestTranslation::test_insertion_transformer"
    assert sorted(found) == ["tests/test_a.py::test_it", passed, "tests/test_c.py"] and ended.returncode == 1, ended


PYTHON = [sys.executable, "-S", "-c"]


def test_a_stage_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path, monkeypatch) -> None:
    os.mkfifo(path := tmp_path / "held")  # open as long as the stage's processes live
    read = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    wait = subprocess.Popen.wait

    def time_is_up(process: subprocess.Popen, timeout: float | None = None) -> int:
        if timeout is None:
            return wait(process)
        assert select.select([read], [], [], 60)[0] and os.read(read, 1) == b"x"
        raise subprocess.TimeoutExpired("slow", timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", time_is_up)
    start = f"import os, time; held = open('{path}', 'w'); os.fork() or os.write(held.fileno(), b'x'); time.sleep(600)"
    assert gpu_check.run(Stage("slow", [*PYTHON, start], 30), 30, tmp_path / "log")["status"] == "timed out"
    assert select.select([read], [], [], 60)[0] and os.read(read, 1) == b""  # once all that had it are gone
    os.close(read)


def test_a_failing_stage_stops_no_other_and_results_are_kept(tmp_path: Path, monkeypatch, capsys) -> None:
    results = tmp_path / "nvidia-h100.json"
    results.write_text(json.dumps({"other": 1, "gpu check": {"first": "old", "build": {"status": "passed"}}}))
    fails, passes = "print('what went wrong\\nthe end'); raise SystemExit(3)", "print('all is well')"
    programs = {"first": [*PYTHON, fails], "second": [*PYTHON, passes], "absent": ["no-such-sanitizer"]}
    stages = [Stage(name, words, 300) for name, words in programs.items()]
    fakes = {"device_name": lambda: "nvidia-h100", "stages": lambda *given: stages}
    for name, value in {"ROOT": tmp_path, **fakes}.items():
        monkeypatch.setattr(gpu_check, name, value)
    out = ["--out", str(tmp_path)]
    assert gpu_check.main(out) == 1
    printed = capsys.readouterr().out
    assert "what went wrong" in printed and "3 stages, not passed: first, absent" in printed
    found = json.loads(results.read_text())
    assert found["other"] == 1 and found["gpu check"]["build"] == {"status": "passed"}
    ended = [(*found["gpu check"][stage.name].values(),)[1::2] for stage in stages]
    absent = ("failed", "no-such-sanitizer is not on PATH")
    assert ended == [("failed", "the end"), ("passed", "all is well"), absent]
    for words, status, says in (
        ("second", 0, "1 stages, all passed"),
        ("--minutes 1e-9 second", 1, "no time was left"),
    ):
        assert gpu_check.main([*out, *words.split()]) == status and says in capsys.readouterr().out
    with pytest.raises(SystemExit):
        gpu_check.main(["first", "c"])


def test_a_stage_leaves_the_time_that_later_ones_have_reserved(tmp_path: Path, monkeypatch, capsys) -> None:
    given: dict[str, float] = {}
    wait = subprocess.Popen.wait

    def waited(process: subprocess.Popen, seconds: float | None = None) -> int:
        if seconds is not None:
            given[process.args[-1]] = seconds
        return wait(process, seconds)

    monkeypatch.setattr(subprocess.Popen, "wait", waited)
    plan = [
        Stage("long", [*PYTHON, "0 # long"], 500, reserved=20),
        Stage("measured", ["sh", "-c", 'echo "$0"', gpu_check.BUDGET], 300, reserved=150),
        Stage("last", [*PYTHON, "0 # last"], 500, reserved=30),
    ]
    assert gpu_check.check(plan, tmp_path / "gpu.json", 400) == []
    assert given["0 # long"] == pytest.approx(220, abs=20) and given["0 # last"] == pytest.approx(400, abs=20)
    budget = int(json.loads((tmp_path / "gpu.json").read_text())["gpu check"]["measured"]["summary"])
    assert budget == 275  # of its limit of 300


@pytest.mark.slow
def test_a_rehearsal_runs_the_stages_on_a_cpu(tmp_path: Path, capsys) -> None:
    stages = ["environment", "operations", "layers", "racecheck", "CUDA graph"]
    assert gpu_check.main(["--rehearse", "--out", str(tmp_path), *stages]) == 0
    assert "CUDA graph: left out, a rehearsal has no GPU" in (printed := capsys.readouterr().out)
    assert "4 stages, all passed" in printed and (tmp_path / "logs" / "operations.log").is_file()
    with pytest.raises(SystemExit):
        gpu_check.main(["--rehearse"])


def test_the_plan_names_existing_programs_and_each_sanitizer_tool(monkeypatch) -> None:
    plan = {stage.name: stage for stage in gpu_check.stages("gpu")}
    named = [word.split()[-1] for stage in plan.values() for word in stage.command if word.endswith(".py")]
    assert named and all((ROOT / name).is_file() for name in named)
    assert plan["build"].environment == {"FASTWEIGHTS_BUILD": "cuda", "TORCH_CUDA_ARCH_LIST": ""}
    for tool in ("memcheck", "racecheck", "synccheck", "initcheck"):
        assert f"--error-exitcode 86 --print-limit 20 --tool {tool} {sys.executable}" in " ".join(plan[tool].command)
        # Else memory that torch keeps for other tensors would count as this one's, and as written.
        assert plan[tool].environment == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    found = [Mock(returncode=n, stdout="NVIDIA H100 80GB\n", stderr="Error: Torch without CUDA\n") for n in (0, 1)]
    monkeypatch.setattr(gpu_check.subprocess, "run", Mock(side_effect=found))
    assert gpu_check.device_name() == "nvidia-h100-80gb"
    with pytest.raises(SystemExit, match=r"finds no GPU \(Error: Torch without CUDA\); .* `make PYTHON="):
        gpu_check.main([])


@pytest.mark.skipif(ops.chosen_backend("cpu", torch.float32, 1) != "native", reason="needs the CPU kernels")
@pytest.mark.parametrize(("program", "status"), [("memory", 0), ("determinism", 1)])
def test_calls_every_operator_by_each_algorithm_and_finds_bits_that_change(program, status, monkeypatch, capsys):
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
    assert len(json.loads(capsys.readouterr().out)) == calls * status
