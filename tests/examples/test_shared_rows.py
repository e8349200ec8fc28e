"""Several processes: rows of a table on GPUs and machines, nodes of Slurm's, and rules over segments of one text."""

import os
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from common import steps
from papers import grid, ledger
from sequence_parallel.run import RULES
from sequence_parallel.run import run as run_in_parallel

from tests.conftest import QUIET, SMALL_MODEL, TASK

from . import tiny_table
from .conftest import EXAMPLES, ROOT, reproduce_command, run_script, write_programs


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


def test_rows_of_a_killed_process_are_its_jobs_of_an_ended_one_free(tmp_path: Path) -> None:
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
    assert not start("long", tmp_path).communicate(timeout=300)[1] and rows_kept(tmp_path) == ["a", "b", "slow"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch, reproduce):
    def call(name: str, *options: str, gpus: str = "", **how: Any) -> tuple[str, str]:
        monkeypatch.setattr(reproduce_command, "ALL", reproduce_command.ALL | tiny_table.TABLES)
        monkeypatch.setattr(steps.Runner, "pause", 0.02)
        monkeypatch.setattr(grid, "visible", gpus.split)
        (tmp_path / "data").mkdir(exist_ok=True)
        return reproduce("run", name, tmp_path / "data", tmp_path / "out", *options, **how)

    return call


def test_a_row_that_fails_leaves_the_others_running_and_is_named(run, tmp_path: Path) -> None:
    said, err = run("failing", "--jobs", "2", fails=True)
    assert rows_kept(tmp_path) == ["a", "b"] and "  | what went wrong" in said
    assert err.startswith("error: 2 of 6 commands failed or were not run:\n  broken, seed 1 failed: exit status 1\n")
    assert err.endswith("  broken, seed 1: test was not run, as it uses a step that failed\n")
    said, err = run("failing", fails=True)
    assert said.startswith("2 of 3 runs are in ") and "broken, seed 1 failed: exit status 1" in err


@pytest.mark.parametrize(
    ("gpus", "env", "options", "most", "given"),
    [
        ("3 5", {}, "", 2, {"train": {"3", "5"}}),
        ("GPU-a GPU-b GPU-c", {"GPUS": "2"}, "", 1, {"train": {"GPU-a,GPU-b"}, "score": {"GPU-a"}}),
        ("0", {}, "--jobs 2", 2, {"train": {"0"}}),  # that two share
        ("0 1 2 3", {}, "--jobs 2 -- --cpu", 2, {"train": {"-"}, "score": {"-"}}),
    ],
)
def test_each_job_has_its_gpus(gpus, env, options, most, given, run, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    said, _ = run("tiny", *options.split(), gpus=gpus, TOGETHER=str(most), **env)
    assert ("a, seed 1 (GPU " in said) == ("-" not in given["train"])
    happened = jobs(tmp_path)
    assert max(accumulate(1 if what == "begin" else -1 for what, *_ in happened)) == most
    for verb, names in given.items():
        assert {name for _, kind, _, name, _ in happened if kind == verb} == names
    for name in {job[3] for job in happened if "--jobs" not in options}:  # one at a time has it
        of_it = [what for what, _, _, names, _ in happened if names == name]
        assert of_it == ["begin", "end"] * (len(of_it) // 2)


def test_a_run_is_kept_once_with_its_options_and_is_of_no_others(run, tmp_path: Path) -> None:
    options = "--rows a -- --lr 1 --cpu --num-workers 0 -- --fp16 --".split()
    assert "error: GPUS is 4; it must be at most 2, " in run("tiny", gpus="0 1", fails=True, GPUS="4")[1]
    run("tiny", *options)
    (found,) = ledger.read_ledger(book := tmp_path / "out" / "ledger.jsonl")
    train, score = (line.split(" job ")[1] for line in found.commands)
    assert train == "train a OUT --lr 1 --cpu --num-workers 0 --seed 1"
    assert score == "score a OUT --cpu --num-workers 0 --fp16 --"
    assert run("tiny", *options)[0].startswith("1 of 1 runs are in ")
    book.unlink()  # as if the run had been ended before it wrote down its result
    run("tiny", *options)
    assert ledger.read_ledger(book) == [found] and len(jobs(tmp_path)) == 4
    assert "a-1 was begun with another command or data; name another OUT" in run("tiny", fails=True)[1]
    run("tiny", "--rows", "b", "--", "--cpu", DEVICE="gpu")
    assert not any("--cpu" in line for line in ledger.read_ledger(book)[-1].commands)
    assert run("tiny", DEVICE="cuda", fails=True)[1] == "error: DEVICE is cuda; it must be cpu or gpu\n"


def test_an_array_of_slurms_shares_a_tables_rows(tmp_path: Path) -> None:
    python = f'shift; exec {sys.executable} {tiny_table.__file__} "$@"'
    path = write_programs(tmp_path, {"srun": 'exec "$@"', "python": python})
    (tmp_path / "data").mkdir()
    words = ["bash", EXAMPLES / "distributed/rows.sbatch", "tiny", tmp_path / "data", tmp_path / "out", "--jobs", "1"]
    array = [subprocess.Popen(words, env=os.environ | {"PATH": path}, cwd=ROOT) for _ in range(3)]
    assert [job.wait(timeout=300) for job in array] == [0] * 3 and rows_kept(tmp_path) == list("abcde")
    done = [job[:3] for job in jobs(tmp_path)]
    assert all(done.count(job) == 1 for job in done) and len(done) == 2 * 2 * 5


@pytest.mark.slow
def test_two_nodes_of_slurms_train_one_model(our_fairseq, corpus, tmp_path):
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    # One agent for each node; it fails if one does.
    programs = {"scontrol": "echo localhost; echo localhost", "srun": '"$@" & first=$!; "$@" & wait $! && wait $first'}
    env = {"SLURM_JOB_NODELIST": "two", "SLURM_NNODES": 2, "SLURM_JOB_ID": 7, "PROCESSES": 1, "PORT": port}
    env["PATH"] = write_programs(tmp_path, programs)
    flags = [*TASK, *SMALL_MODEL, *QUIET, *"--tokens-per-sample 16 --batch-size 4 --disable-validation".split()]
    flags += [*"--optimizer adam --lr 0.01 --max-update 2 --save-dir".split(), tmp_path / "checkpoints"]
    said = run_script(EXAMPLES / "distributed" / "train.sbatch", corpus, *flags, **env)
    assert "training on 2 devices" in said and (tmp_path / "checkpoints" / "checkpoint_last.pt").is_file()


def test_segments_in_processes_are_one_text(monkeypatch: pytest.MonkeyPatch) -> None:
    # Forked, for a new process would take seconds to import torch.
    forked = partial(torch.multiprocessing.start_processes, start_method="fork")
    monkeypatch.setattr(torch.multiprocessing, "spawn", forked)
    # 37 steps, which 2 processes share unequally; a state that is not square.
    sizes = {"processes": 2, "batch": 2, "time": 37, "heads": 2, "key_dim": 5, "value_dim": 3}
    found = run_in_parallel(Namespace(**sizes, rules=RULES, measure=False), torch.float64)
    assert [row[:2] for row in found] == [(rule, rank) for rule in RULES for rank in range(2)]
    assert all(difference < 1e-12 for _, _, difference, *_ in found), found  # sums in another order
