"""reproduce.py run: rows on several GPUs, beside other processes and machines, and in an array of Slurm's."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from common import steps
from papers import grid, ledger, row_runner

from . import tiny_table
from .conftest import EXAMPLES, ROOT, reproduce_command, write_programs


def start(name: str, tmp_path: Path, *options: str, begun: int = 0) -> subprocess.Popen[str]:
    """A process that runs a table; when this returns, so many jobs have begun in all."""
    (tmp_path / "data").mkdir(exist_ok=True)
    words = [sys.executable, tiny_table.__file__, "run", name, str(tmp_path / "data"), str(tmp_path / "out"), *options]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while len(jobs(tmp_path)) < begun:
        assert process.poll() is None
        time.sleep(0.05)
    return process


def jobs(tmp_path: Path) -> list[list[str]]:
    noted = tmp_path / "out" / "jobs.txt"
    return [line.split() for line in noted.read_text().splitlines()] if noted.exists() else []


def rows_kept(tmp_path: Path) -> list[str]:
    return sorted(entry.row for entry in ledger.read_ledger(tmp_path / "out" / "ledger.jsonl"))


def test_a_killed_processes_rows_are_its_jobs_and_those_of_one_that_ends_are_free(tmp_path: Path) -> None:
    first = start("long", tmp_path, "--jobs", "1", begun=1)
    first.send_signal(signal.SIGTERM)
    assert "the same command goes on from here" in first.communicate(timeout=300)[1] and first.returncode == 130
    second = start("long", tmp_path, "--jobs", "1", begun=2)
    second.kill()
    second.communicate()
    said, err = start("long", tmp_path, "--jobs", "1").communicate(timeout=300)
    assert f"slow-1: left to process {second.pid} on " in said and not err and rows_kept(tmp_path) == ["a", "b"]
    os.kill(int(jobs(tmp_path)[1][-1]), signal.SIGKILL)
    (tmp_path / "out" / "go").touch()
    last = start("long", tmp_path)
    assert not last.communicate(timeout=300)[1] and rows_kept(tmp_path) == ["a", "b", "slow"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch, reproduce):
    """Runs a table in this process, on a machine with these GPUs."""

    def call(name: str, *options: str, gpus: str = "", **env: str) -> tuple[int, str, str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reproduce_command, "ALL", dict(reproduce_command.ALL))
            for place, attribute in ((steps.Runner, "pause"), (row_runner, "ASKED"), (grid, "visible")):
                patch.setattr(place, attribute, getattr(place, attribute))
            tiny_table.register(reproduce_command.ALL, gpus.split())
            (tmp_path / "data").mkdir(exist_ok=True)
            return reproduce("run", name, tmp_path / "data", tmp_path / "out", *options, **env)

    return call


def test_a_row_that_fails_leaves_the_others_running_and_is_named(run, tmp_path: Path) -> None:
    status, said, err = run("failing", "--jobs", "2")
    assert status == 1 and rows_kept(tmp_path) == ["a", "b"] and "  | what went wrong" in said
    assert err.splitlines() == [
        "error: 2 of 6 commands failed or were not run:",
        "  broken, seed 1 failed: exit status 1",
        "  broken, seed 1: test was not run, as it uses what failed",
    ]
    status, said, err = run("failing")
    assert status == 1 and said.startswith("2 of 3 runs are in ") and "broken, seed 1 failed: exit status 1" in err


@pytest.mark.parametrize(
    ("gpus", "env", "options", "most", "given"),
    [
        ("3 5", {}, "", 2, {"train": {"3", "5"}}),
        ("GPU-a GPU-b GPU-c", {"GPUS": "2"}, "", 1, {"train": {"GPU-a,GPU-b"}, "score": {"GPU-a"}}),
        ("0", {}, "--jobs 2", 2, {"train": {"0"}}),  # that two share
        ("0 1 2 3", {}, "--jobs 2 -- --cpu", 2, {"train": {"-"}, "score": {"-"}}),
        ("0 1", {"GPUS": "4"}, "", 0, {}),
    ],
)
def test_each_job_has_its_gpus(gpus, env, options, most, given, run, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    status, said, err = run("tiny", *options.split(), gpus=gpus, TOGETHER=str(most), **env)
    if not most:
        assert status == 1 and err == "error: GPUS is 4; it must be at most 2, as there are GPUs: 0, 1\n"
        return
    assert status == 0, err
    noted = jobs(tmp_path)
    for verb, names in given.items():
        assert {name for _, kind, _, name, _ in noted if kind == verb} == names
    at_work, at_once = [], 0
    for what, _, _, names, pid in noted:
        if what == "end":
            at_work.remove((names, pid))
            continue
        assert "--jobs" in options or all(names != other for other, _ in at_work)
        at_work.append((names, pid))
        at_once = max(at_once, len(at_work))
    assert at_once == most and ("a, seed 1 (GPU " in said) == ("-" not in given["train"])


def test_options_reach_training_and_some_of_them_scoring(run, tmp_path: Path) -> None:
    options = "--rows a -- --lr 1 --cpu --num-workers 0 -- --fp16 --".split()
    status, _, err = run("tiny", *options)
    assert status == 0, err
    (found,) = ledger.read_ledger(tmp_path / "out" / "ledger.jsonl")
    train, score = (line.split(" job ")[1] for line in found.commands)
    assert train == "train a OUT --lr 1 --cpu --num-workers 0 --seed 1"
    assert score == "score a OUT --cpu --num-workers 0 --fp16 --"


def test_an_array_of_slurms_shares_a_tables_rows(tmp_path: Path) -> None:
    path = write_programs(
        tmp_path, {"srun": 'exec "$@"', "python": f'shift; exec {sys.executable} {tiny_table.__file__} "$@"'}
    )
    (tmp_path / "data").mkdir()
    words = ["bash", EXAMPLES / "distributed/rows.sbatch", "tiny", tmp_path / "data", tmp_path / "out", "--jobs", "1"]
    array = [subprocess.Popen(words, env=os.environ | {"PATH": path}, cwd=ROOT) for _ in range(3)]
    assert [job.wait(timeout=300) for job in array] == [0] * 3 and rows_kept(tmp_path) == list("abcde")
    done = Counter((what, verb, row) for what, verb, row, *_ in jobs(tmp_path))
    assert set(done.values()) == {1} and len(done) == 2 * 2 * 5
