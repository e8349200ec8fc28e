"""The programs run, on tiny cases, and leave results that can be read; the committed page says what the results say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import all_cpu
import kernels
import pytest
import report
import torch

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


def program(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT.parent,  # they work from anywhere
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_all_results_of_a_cpu_are_made_by_one_command(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    result = program("all_cpu.py", "--quick", "--threads", 1, "--results", tmp_path, "--page", page)
    assert result.returncode == 0, result.stderr
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(found) == {"kernels_cpu.json", "next_token.json", "training_length.json", "translation.json"}
    for record in found.values():
        assert record["device"] == "cpu" and record["threads"] == 1 and record["cut"] == []
        assert record["machine"]["cpu"] and record["versions"]["torch"] == torch.__version__

    rows = found["kernels_cpu.json"]["rows"]
    assert {row["pass"] for row in rows} == {"forward", "forward+backward", "step"}
    measured = {(row["implementation"], row["rule"]) for row in rows if row["status"] == "measured"}
    for rule in ("sum", "gated", "decay", "delta"):
        assert {("chunkwise", rule), ("reference", rule)} <= measured
    assert ("SDPA", "softmax") in measured
    for row in rows:  # who was not measured says why
        assert row["status"] == "measured" or (row["status"] == "unavailable" and row["message"])
        if row["status"] == "measured":
            seconds = row["seconds"]
            assert 0 < seconds["min"] <= seconds["lower"] <= seconds["median"] <= seconds["upper"]
            assert row["limit"]["seconds"] > 0

    tokens = found["next_token.json"]["rows"]
    assert {(row["model"], row["length"]) for row in tokens} == {
        (model, length) for model in ("transformer", "delta", "decay", "sum") for length in (16, 32)
    }
    translation = found["translation.json"]
    models = ("transformer", "elu", "dpfp-2", "favor-128")
    assert {(row["model"], row["beam"], row["source"], row["length"]) for row in translation["rows"]} == {
        (model, beam, *case) for model in models for beam in (1, 4) for case in ((4, 4), (4, 8), (8, 8))
    }
    assert [row["model"] for row in translation["whole"]] == list(models)
    assert "](translation.json)" in page.read_text()
    for name in ("next_token.png", "training_length.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert f"]({name})" in page.read_text()


@pytest.mark.parametrize("given", [[], ["--results"], ["--page"], ["--results", "--page"]])
@pytest.mark.parametrize("quick", [True, False])
def test_tiny_cases_never_replace_what_was_measured(
    quick: bool, given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[str, dict[str, Path]] = {}

    def note(name: str, *arguments: str) -> None:
        values = dict(zip(arguments[::2], map(Path, arguments[1::2]), strict=False))  # --quick, the last, has none
        calls[name] = {key: values[key] for key in ("--out", "--figure", "--results", "--page") if key in values}

    monkeypatch.setattr(all_cpu, "run", note)
    chosen = {"--results": tmp_path / "results", "--page": tmp_path / "page.md"}
    arguments = [word for option in given for word in (option, chosen[option])]
    run_here(all_cpu.main, monkeypatch, *arguments, *(["--quick"] if quick else []))

    report_call = calls.pop("report.py")
    written = {path.parent for call in calls.values() for path in call.values()}
    assert written == {report_call["--results"]} and len(calls) == 4
    usual = {"--results": all_cpu.RESULTS, "--page": all_cpu.PAGE}
    for option, place in report_call.items():
        if option in given:
            assert place == chosen[option]
        elif quick:
            assert ROOT not in place.parents and not place.exists()
        else:
            assert place == usual[option]


@pytest.mark.slow
def test_training_counts_the_words_that_fairseq_counts(tmp_path: Path) -> None:
    out = tmp_path / "training.json"
    arguments = ("--quick", "--rounds", 1, "--models", "delta", "--threads", 1, "--out", out)
    result = program("training.py", *arguments)
    assert result.returncode == 0, result.stderr
    rows = {row["model"]: row["words per second"] for row in json.loads(out.read_text())["rows"]}
    assert set(rows) == {"softmax", "delta"}
    assert all(speed["min"] > 0 and speed["rounds"] == 2 for speed in rows.values())  # updates 3 and 4 of 4


def run_here(main: Callable[[], None], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    """Runs a program in this process, which saves its start."""
    monkeypatch.setattr(sys, "argv", ["program", *map(str, arguments)])
    main()


def test_the_page_says_what_the_results_say(monkeypatch: pytest.MonkeyPatch) -> None:
    run_here(report.main, monkeypatch, "--check")


def test_a_page_out_of_date_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    for old in (None, "old\n"):
        if old is not None:
            page.write_text(old)
        with pytest.raises(SystemExit, match=r"report.py writes it"):
            run_here(report.main, monkeypatch, "--check", "--page", page)
    assert page.read_text() == "old\n"
    run_here(report.main, monkeypatch, "--page", page)
    run_here(report.main, monkeypatch, "--check", "--page", page)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rules", "sum,product"], "no such rules: product"),
        (["--shapes", "tiny"], "no such shapes: tiny"),
        pytest.param(
            ["--device", "cuda"],
            "torch sees no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_what_is_not_there_is_named(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        run_here(kernels.main, monkeypatch, *arguments)
    assert message in f"{error.value} {capsys.readouterr().err}"


@pytest.mark.parametrize(
    ("name", "option"),
    [
        *[(name, "--rounds") for name in ("kernels", "generation", "translation", "training", "training_length")],
        *[(name, "--threads") for name in ("kernels", "all_cpu")],
        *[("cuda_plans", "--rounds"), ("translation", "--whole"), ("training", "--batch-size")],
        *[("sliding_window", option) for option in ("--tokens", "--rounds", "--batch-size")],
    ],
)
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many"])
def test_counts_are_positive_whole_numbers(
    name: str, option: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_here(import_module(name).main, monkeypatch, option, value)
    assert f"argument {option}: {value} is not a positive whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["kernels", "generation", "translation", "training", "training_length", "all_cpu", "cuda_plans"]
)
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "long"])
def test_a_budget_is_a_positive_number_of_seconds(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_here(import_module(name).main, monkeypatch, "--budget", value)
    assert f"argument --budget: {value} is not a positive number of seconds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("folder", "message"), [("missing", "missing, which is no folder"), ("empty", "empty, which holds no results")]
)
def test_a_page_is_not_made_of_nothing(
    folder: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "other.json").write_text('{"tokens": 3}')
    page = tmp_path / "page.md"
    page.write_text("old\n")
    with pytest.raises(SystemExit, match="2"):
        run_here(report.main, monkeypatch, "--results", tmp_path / folder, "--page", page)
    assert message in capsys.readouterr().err
    assert page.read_text() == "old\n"


def test_results_are_found_within_those_of_a_device(tmp_path: Path) -> None:
    record = {"program": "kernels", "device": "cuda", "date": "2026-01-02"}
    later = {"program": "training", "device": "cuda", "date": "2026-01-01"}
    (tmp_path / "a.json").write_text(json.dumps({"tests": {"passed": 3}, "end to end": later, "kernels": record}))
    (tmp_path / "b.json").write_text(json.dumps(record | {"device": "cpu"}))
    (tmp_path / "c.json").write_text(json.dumps({"tokens": 3}))
    found = [(path.name, record["device"], record["program"]) for path, record in report.find_records(tmp_path)]
    assert found == [("b.json", "cpu", "kernels"), ("a.json", "cuda", "kernels"), ("a.json", "cuda", "training")]


def test_what_was_measured_in_another_way_is_not_shown(tmp_path: Path) -> None:
    old = {"program": "generation", "device": "cpu", "date": "2026-01-02T03:04:05", "rows": [{"model": "transformer"}]}
    (tmp_path / "old.json").write_text(json.dumps(old))
    page = report.render(report.find_records(tmp_path), tmp_path / "page.md")
    assert "unmeasured: generation.py was not run as it measures now" in page
    assert "Not measured as generation.py measures now; [what it measured on 2026-01-02](old.json) says" in page
