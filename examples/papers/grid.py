"""Runs: rows of a table with their seeds, as steps; trained and scored one beside the other, and kept in a ledger."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from common.commands import cores, one_thread
from common.fairseq_logs import describe_training, parse_training
from common.files import UserError, take
from common.identity import identity
from common.steps import BEGUN, DEVICES, Runner, Step, mark, read_json

from papers import SCALED, TABLES
from papers.ledger import (
    Entry,
    append_entry,
    circumstances,
    command_lines,
    data_digest,
    inputs_digest,
    precision,
    read_ledger,
)
from papers.rows import BEST, Places, Row, Scoring, Table, positive

TRIED = 12
"""Updates from which the time of a training is estimated."""
_POINTS = 100


@dataclass(frozen=True)
class Run:
    """A row with a seed."""

    table: str
    name: str
    seed: int
    places: Places
    commands: list[str]  # those of its steps, as the ledger has them
    steps: list[Step]  # its training, and all that scores it
    inputs: str  # as in `Entry`

    @property
    def key(self) -> tuple[str, str, int, tuple[str, ...]]:
        """The key that tells it from others."""
        return self.table, self.name, self.seed, tuple(self.commands)

    def is_in(self, entries: Sequence[Entry], data: str) -> bool:
        """True if an entry of a ledger is of this run, on data of this digest."""
        return any(e.key == self.key and e.data == data and e.inputs in ("", self.inputs) for e in entries)

    def is_done(self) -> bool:
        return all(step.result() is not None for step in self.steps)

    def entry(self, told: dict[str, Any]) -> Entry:
        """The ledger's entry, once all of it is done; `told` is the result of `circumstances` before."""
        train, *evaluations = (step.finished_result() for step in self.steps)
        curve = train["train"]
        every = max(1, -(-len(curve) // _POINTS))  # rounded up
        return Entry(
            table=self.table,
            row=self.name,
            seed=self.seed,
            commands=self.commands,
            **told,
            seconds=train["seconds"],
            parameters=train["parameters"],
            gpu=train.get("gpu", ""),
            gpus=train.get("gpus", 0),
            precision=precision(self.steps[0].command),
            words_per_second=train.get("words_per_second"),
            memory_gib=train.get("gpu_memory") or self.steps[0].peak_memory(),
            backends=train.get("backends", []),
            without_kernels=train.get("without_kernels", []),
            inputs=self.inputs,
            scores={name: value for scores in evaluations for name, value in scores.items()},
            valid=train["valid"],
            train=curve[every - 1 :: every],
        )


def plan(
    name: str,
    table: Table,
    rows: Sequence[str],
    seeds: Sequence[int],
    places: Places,
    options: Sequence[str] = (),
    scoring: Sequence[str] = (),
    checked: bool = True,
) -> list[Run]:
    """The runs of these rows, those of the first seed first.

    `seeds`: for each row; the table's if there are none. `places`: `out` is for all of them. `options`: of
    fairseq-train; `scoring`: of the programs that score. `checked`: whether the folders must hold the files that a
    training needs. Raises UserError if a row cannot be run so.
    """
    found = {}
    for row in rows:
        for number, seed in enumerate(seeds or table.rows[row].seeds):
            found[row, seed] = number
    # A row that others start from is trained, too, and before them.
    for row in rows:
        before = 0
        while source := table.rows[row].source:
            row, before = source, before - 1
            found[row, 1] = min(before, found.get((row, 1), 0))
    data, start = places.data, places.checkpoint
    learned = f"{data_digest(data)} {inputs_digest(data, start, 'valid')}" if checked else ""
    inputs = inputs_digest(data, start, "valid", "test") if checked else ""
    env = {key: value for key, value in os.environ.items() if key in ("GPUS", "UPDATE_FREQ", "PRECISION")}
    runs: dict[tuple[str, int], Run] = {}
    # By the seeds' order; the sort is stable, and sources, with their negative numbers, come first.
    for label, seed in sorted(found, key=found.__getitem__):
        row = table.rows[label]
        source = runs.get((row.source or "", 1))
        here = replace(places, out=places.out / f"{trained_as(name, label)}-{seed}")
        if source:
            here = replace(here, source=source.places.out / BEST)
        elif checked and row.recipe.sources and start is None:
            raise UserError(f"SOURCE is not given; {name} {label} starts from a model, which --source must name")
        training = _on_device(row.recipe.training(row.options, here, [*options, "--seed", str(seed)], env))
        scorings = row.recipe.evaluations(here, [*_machine_options(options), *scoring], env)
        scorings = [replace(each, words=_on_device(each.words)) for each in scorings]
        if checked:
            row.recipe.check("train", replace(here, source=None) if source else here, env)
        title = f"{label}, seed {seed}"
        # One training serves all rows that have the same.
        trained = next((run.steps[0] for run in runs.values() if run.places.out == here.out), None)
        first = trained or Step(
            **_training(title, training, row, here),
            after=source.steps[:1] if source else (),
            depends_on=learned,
            resumes=True,
            gpus=0 if "--cpu" in training else positive(os.environ, "GPUS"),
        )
        others = [
            Step(
                **_scoring(title, each, row, here),
                after=[first],
                depends_on=inputs,
                locks=here.out,
                gpus=int("--cpu" not in each.words),
            )
            for each in scorings
        ]
        commands = command_lines([training, *(each.words for each in scorings)], here)
        runs[label, seed] = Run(name, label, seed, here, commands, [first, *others], inputs)
    return list(runs.values())


def steps_by_hand(
    verb: str, title: str, row: Row, places: Places, options: list[str], checked: bool = True
) -> list[Step]:
    """The steps of one row in a folder of its own: its training, which goes on with whatever that holds, or the scoring
    of a checkpoint there, which is done again for other weights, data or kernels. `checked`: as of `plan`. Raises
    UserError if a setting in the environment cannot be, or a folder lacks a file.
    """
    training = row.recipe.training(row.options, places, options, os.environ) if verb == "train" else []
    scorings = row.recipe.evaluations(places, options, os.environ) if verb == "evaluate" else []
    if checked:
        row.recipe.check(verb, places, os.environ)
    # By hand a training is never done: it goes on with whatever OUT holds.
    if training:
        return [Step(**_training(title, training, row, places, finishes=False), always=True, log_name="train.log")]
    of = [json.dumps(identity(each.checkpoint, each.reads)) if checked else "" for each in scorings]
    return [
        Step(**_scoring(title, each, row, places), depends_on=digest, locks=places.out)
        for each, digest in zip(scorings, of, strict=True)
    ]


def _training(title: str, words: Sequence[str], row: Row, places: Places, finishes: bool = True) -> dict[str, Any]:
    """A training as a step; `finishes`: whether it is an error if it ends before its end, as with --dry-run."""

    def read(log: str) -> dict[str, Any]:
        training = parse_training(log)
        if training.parameters is None or not training.finished:
            if finishes:
                raise ValueError("its log has no model in it, or not its end")
            return {}
        row.recipe.finish(places)  # others may begin from its checkpoint from now on
        return {
            "parameters": training.parameters,
            "seconds": training.seconds,
            "gpu": ", ".join(dict.fromkeys(training.gpus)),
            "gpus": len(training.gpus),
            "gpu_memory": training.gpu_memory,
            "words_per_second": training.speed,
            "backends": training.backends,
            "without_kernels": training.without_kernels,
            "train": sorted(training.train.items()),
            "valid": sorted(training.valid.items()),
        }

    updates = _updates(words)
    progress = {"describe_progress": lambda log: describe_training(log, updates)} if updates else {}
    return {"title": title, "folder": places.out, "command": words, "read_result": read, **progress}


def _scoring(title: str, each: Scoring, row: Row, places: Places) -> dict[str, Any]:
    read = partial(row.recipe.scores, each.title, places)
    folder = places.out / each.folder
    return {"title": f"{title}: {each.title}", "folder": folder, "command": each.words, "read_result": read}


@cache
def trained_as(table: str, name: str) -> str:
    """The row whose training a row's is: the first of those of all tables that are trained by the same command.

    A row that starts from another of its table's, and one of a table that is not among all, is trained as itself.
    """

    def training(row: Row) -> list[str] | None:
        places = Places(Path("DATA"), Path("OUT"), Path("SOURCE"))
        return None if row.source else row.recipe.training(row.options, places, [], {})

    rows = TABLES | SCALED
    own = training(rows[table].rows[name]) if table in rows and name in rows[table].rows else None
    if own is None:
        return name
    return next(found for each in rows.values() for found, row in each.rows.items() if training(row) == own)


def _on_device(words: list[str]) -> list[str]:
    """A command for the device that DEVICE names, "cpu" or "gpu": rows that are scaled down ask for the CPU. Raises
    UserError for another.
    """
    device = os.environ.get("DEVICE") or "cpu"
    if device not in ("cpu", "gpu"):
        raise UserError(f"DEVICE is {device}; it must be cpu or gpu")
    return words if device == "cpu" else [word for word in words if word != "--cpu"]


def _machine_options(options: Sequence[str]) -> list[str]:
    """The options of a training that choose the machine's part that a program uses, not its results."""
    found = [["--cpu"] for word in options if word == "--cpu"][:1]
    for at, word in enumerate(options):
        if word.split("=")[0] == "--num-workers":
            found.append(list(options[at : at + (1 if "=" in word else 2)]))
    return [word for words in found for word in words]


def _updates(words: Sequence[str]) -> int | None:
    at = [number for number, word in enumerate(words) if word == "--max-update"]
    return int(words[at[-1] + 1]) if at else None


def visible() -> list[str]:
    """The GPUs that torch sees, by the names that `DEVICES` has for them."""
    import torch  # which takes its time

    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get(DEVICES, "").split(",") if name.strip()]
    return (named or [str(number) for number in range(count)])[:count]


@dataclass(frozen=True)
class Way:
    """How runs are run."""

    jobs: int | None = None  # how many at a time; None is as many as there are GPUs for, or cores
    estimate: str = "yes"  # prints first how long it will take; "only" runs nothing; or "no"
    environment: Mapping[str, str] = field(default_factory=one_thread)  # variables of the commands
    mark: str = "made-by-reproduce"  # the file that marks OUT as made by this program
    replaces: bool = False  # whether runs that were begun with other commands or data begin anew


def run_grid(runs: Sequence[Run], out: Path, ledger: Path, way: Way) -> None:
    """Trains and scores the runs that the ledger does not have, and adds them there. Raises UserError.

    An interrupted run goes on where it was; one that another process is at work on is left to it. Those that fail are
    named at the end.
    """
    told = circumstances(runs[0].places.data)
    _keep_finished(runs, ledger, told)
    entries = read_ledger(ledger)
    left = [run for run in runs if not run.is_in(entries, told["data"])]
    if len(left) < len(runs):
        print(f"{len(runs) - len(left)} of {len(runs)} runs are in {ledger}", flush=True)
    # A run of another folder in the ledger must be made again where others start from it.
    used = [step for run in left for step in run.steps[0].after if step.result() is None]
    steps = list(dict.fromkeys([*used, *(step for run in left for step in run.steps)]))
    for run in left:
        begun = read_json(run.places.out / BEGUN)
        if begun and begun.get("key") != run.steps[0].key and not way.replaces:
            raise UserError(f"{run.places.out} was begun with another command or data; name another OUT, or delete it")
    names = _gpus(steps)
    jobs = way.jobs or (len(names) // max(1, *(step.gpus for step in steps)) if names else cores())
    if way.estimate != "no":
        try:
            _estimate(left, entries, jobs, {DEVICES: ",".join(names)} if names else {})
        except UserError as error:  # the others can be trained
            if way.estimate == "only":
                raise
            print(error)
    if way.estimate == "only" or not left:
        return

    def keep(step: Step) -> None:
        # A training that several rows share ends a run of each whose own scores are there.
        for run in left:
            if step in run.steps and run.is_done():
                append_entry(ledger, run.entry(told))
                print(f"{run.name}, seed {run.seed}: in {ledger}", flush=True)

    mark(out, way.mark)
    Runner(jobs, sys.stdout, way.environment, names, keep).run(steps)


def _keep_finished(runs: Sequence[Run], ledger: Path, told: dict[str, Any]) -> None:
    """Adds the runs that an earlier call finished, which was ended before it wrote them down."""
    entries = read_ledger(ledger)
    for run in runs:
        if run.is_in(entries, told["data"]) or not run.is_done():
            continue
        lock = take(run.steps[0].lock)
        if lock is not None:  # else another process is about to
            if not run.is_in(read_ledger(ledger), told["data"]):
                append_entry(ledger, run.entry(told))
            os.close(lock)


def _gpus(steps: Sequence[Step]) -> list[str]:
    """The GPUs that there are for the steps. Raises UserError if a training needs more."""
    names = visible() if any(step.gpus for step in steps) else []
    trains = positive(os.environ, "GPUS")
    if names and trains > len(names):
        raise UserError(f"GPUS is {trains}; it must be at most {len(names)}, as there are GPUs: {', '.join(names)}")
    return names


def _estimate(left: Sequence[Run], entries: Sequence[Entry], jobs: int, environment: Mapping[str, str]) -> None:
    """Says how long it will take: by the ledger's run of a row, else by a few updates with this environment."""
    hours: dict[str, float] = {}
    left = list({run.steps[0]: run for run in reversed(left)}.values())[::-1]  # of each training one
    for run in left:
        if run.name not in hours and (updates := _updates(run.steps[0].command)) is not None:
            before = [entry.seconds for entry in entries if (entry.table, entry.row) == (run.table, run.name)]
            seconds = before[-1] if before else updates * _seconds_of_an_update(run, environment)
            hours[run.name] = seconds / 3600
    for name, each in hours.items():
        seeds = [str(run.seed) for run in left if run.name == name]
        print(f"{name}: about {each:.1f} hours for each of seeds {', '.join(seeds)}")
    total = sum(hours.get(run.name, 0.0) for run in left)
    if left:
        unknown = " and of rows without --max-update" if any(run.name not in hours for run in left) else ""
        print(f"all: about {total / jobs:.1f} hours of training with {jobs} at a time{unknown}", flush=True)


def _seconds_of_an_update(run: Run, environment: Mapping[str, str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        words = [folder if word == str(run.places.out) else word for word in run.steps[0].command]
        # The model that it starts from may not be trained yet.
        of_source = ("--transfer-from .*", "--finetune-from-model .*", "--criterion attention_transfer")
        for at in range(len(words) - 2, -1, -1):
            if any(re.fullmatch(option, " ".join(words[at : at + 2])) for option in of_source):
                del words[at : at + 2]
        # Of options that are given twice, argparse takes the last.
        words += ["--max-update", str(TRIED), "--log-interval", str(TRIED // 3), "--no-save", "--disable-validation"]
        env = os.environ | one_thread() | environment
        tried = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    steps = parse_training(tried.stdout + tried.stderr).updates_per_second
    if tried.returncode or not steps:
        end = "".join(f"\n  | {line[:300]}" for line in (tried.stdout + tried.stderr).splitlines()[-8:])
        raise UserError(f"{run.name} could not be trained for {TRIED} updates{end}")
    return 1 / steps
