"""Rows of a table with their seeds: trained and scored one beside the other, and kept in a ledger."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TextIO

from common.commands import cores, one_thread
from common.devices import VARIABLE, Devices, visible
from common.fairseq_logs import describe_training, parse_training
from common.locks import take
from common.steps import BEGUN, Step, UserError, mark, read_json

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
from papers.row_runner import RowRunner, lock_of
from papers.rows import BEST, Call, Places, Row, Table, positive

MARK = "made-by-reproduce"
TRIED = 12
"""Updates from which the time of a training is estimated."""
_POINTS = 100


@dataclass(frozen=True)
class Run:
    """A row with a seed.

    `training`, `evaluations`: its calls. `steps`: the same, as they are run. `inputs`: as in `Entry`.
    """

    table: str
    name: str
    row: Row
    seed: int
    places: Places
    training: Call
    evaluations: list[Call]
    steps: list[Step]
    inputs: str

    @property
    def commands(self) -> list[str]:
        return command_lines([self.training, *self.evaluations], self.places)

    @property
    def key(self) -> tuple[str, str, int, tuple[str, ...]]:
        """The key that tells it from others."""
        return self.table, self.name, self.seed, tuple(self.commands)

    def is_in(self, entry: Entry, data: str) -> bool:
        """True if the ledger's entry is of this run, on data of this digest."""
        return entry.key == self.key and entry.data == data and entry.inputs in ("", self.inputs)

    @property
    def updates(self) -> int | None:
        """How many the training has, where it is told."""
        return _updates(self.training.words)

    def entry(self, told: dict[str, Any]) -> Entry:
        """The ledger's entry, once all of it is done; `told` is what `circumstances` was before."""
        train, *evaluations = (step.finished_result() for step in self.steps)
        curve = train["train"]
        every = max(1, -(-len(curve) // _POINTS))
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
            precision=precision(self.training.words),
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
    checked: bool = True,
    scoring: Sequence[str] = (),
) -> list[Run]:
    """The runs of these rows, those of the first seed first.

    `seeds`: for each row; the table's if there are none. `places`: `out` is for all of them. `options`: of
    fairseq-train; `scoring`: of the programs that score. `checked`: whether the folders must hold what a training
    needs. Raises UserError if a row cannot be run so.
    """
    found = {}
    for row in rows:
        for number, seed in enumerate(seeds or table.rows[row].seeds):
            found[row, seed] = number
    # What others start from is trained, too, and before them.
    for row in rows:
        before = 0
        while source := table.rows[row].source:
            row, before = source, before - 1
            found[row, 1] = min(before, found.get((row, 1), 0))
    data, start = places.data, places.checkpoint
    learned = f"{data_digest(data)} {inputs_digest(data, start, 'valid')}" if checked else ""
    inputs = inputs_digest(data, start, "valid", "test") if checked else ""
    runs: dict[tuple[str, int], Run] = {}
    for row, seed in sorted(found, key=found.__getitem__):
        first = runs.get((table.rows[row].source or "", 1))
        trained = {run.places.out: run.steps[0] for run in runs.values()}
        runs[row, seed] = _run(
            name, row, table.rows[row], seed, places, options, scoring, checked, first, trained, learned, inputs
        )
    return list(runs.values())


@cache
def trained_as(table: str, name: str) -> str:
    """The row whose training a row's is: the first of those of all tables that are trained by the same command.

    A row that starts from another of its table's, and one of a table that is not among all, is trained as itself.
    """

    def training(row: Row) -> list[str] | None:
        places = Places(Path("DATA"), Path("OUT"), Path("SOURCE"))
        return None if row.source else row.recipe.training(row.options, places, [], {}).words

    rows = TABLES | SCALED
    own = training(rows[table].rows[name]) if table in rows and name in rows[table].rows else None
    if own is None:
        return name
    return next(found for each in rows.values() for found, row in each.rows.items() if training(row) == own)


def _run(
    table: str,
    name: str,
    row: Row,
    seed: int,
    places: Places,
    options: Sequence[str],
    scoring: Sequence[str],
    checked: bool,
    source: Run | None,
    trained: Mapping[Path, Step],
    learned: str,
    inputs: str,
) -> Run:
    """`source`: the one that it starts from, if that is of the same table. `trained`: the trainings of other runs by
    their folders: one serves all rows that have the same. `learned`, `inputs`: digests of what it is trained on, and of
    what `Entry.inputs` is of.
    """
    start = source.places.out / BEST if source else places.source
    if checked and row.recipe.sources and start is None:
        raise UserError(f"SOURCE is not given; {table} {name} starts from a model, which --source must name")
    here = Places(places.data, places.out / f"{trained_as(table, name)}-{seed}", start)
    env = {key: value for key, value in os.environ.items() if key in ("GPUS", "UPDATE_FREQ", "PRECISION")}
    training = row.recipe.training(row.options, here, [*options, "--seed", str(seed)], env)
    evaluations = row.recipe.evaluations(here, [*_machine_options(options), *scoring], env)
    if _device() == "gpu":
        training, *evaluations = map(_without_cpu, (training, *evaluations))
    if checked:
        row.recipe.check("train", replace(here, source=None) if source else here, env)
    updates = _updates(training.words)
    title = f"{name}, seed {seed}"
    first = trained.get(here.out) or Step(
        title=title,
        folder=here.out,
        command=training.words,
        read_result=partial(_read_training, row, here),
        describe_progress=lambda log: describe_training(log, updates) if updates else "",
        after=source.steps[:1] if source else (),
        depends_on=learned,
        resumes=True,
    )
    others = [
        Step(
            title=f"{title}: {call.title}",
            folder=here.out / (call.log.stem if call.log else "evaluation"),
            command=call.words,
            read_result=partial(row.recipe.scores, call, here),
            after=[first],
            depends_on=inputs,
        )
        for call in evaluations
    ]
    return Run(table, name, row, seed, here, training, evaluations, [first, *others], inputs)


def _device() -> str:
    """The device for rows that are scaled down to a CPU: DEVICE, "cpu" or "gpu". Raises UserError for another."""
    device = os.environ.get("DEVICE") or "cpu"
    if device not in ("cpu", "gpu"):
        raise UserError(f"DEVICE is {device}; it must be cpu or gpu")
    return device


def _without_cpu(call: Call) -> Call:
    return replace(call, words=[word for word in call.words if word != "--cpu"])


def _machine_options(options: Sequence[str]) -> list[str]:
    """The options of a training that say with what a program runs, not what it computes."""
    found = [["--cpu"] for word in options if word == "--cpu"][:1]
    for at, word in enumerate(options):
        if word.split("=")[0] == "--num-workers":
            found.append(list(options[at : at + (1 if "=" in word else 2)]))
    return [word for words in found for word in words]


def _read_training(row: Row, places: Places, log: str) -> dict[str, Any]:
    """The results of a training that has ended; others may begin from its checkpoint from now on."""
    training = parse_training(log)
    if training.parameters is None or not training.finished:
        raise ValueError("its log has no model in it, or not its end")
    row.recipe.finish(places)
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


def _updates(words: Sequence[str]) -> int | None:
    at = [number for number, word in enumerate(words) if word == "--max-update"]
    return int(words[at[-1] + 1]) if at else None


def run_grid(
    runs: Sequence[Run],
    out: Path,
    ledger: Path,
    jobs: int | None,
    output: TextIO,
    only_estimate: bool = False,
    estimates: bool = True,
) -> None:
    """Trains and scores what the ledger does not have, and adds it there. Raises UserError.

    What it takes is estimated and said first. What was cut off goes on where it was; what another process is at work on
    is left to it. What fails is named at the end.

    `jobs`: how many at a time; None is as many as there are GPUs for, or cores. `estimates`: whether to say how long it
    takes, or `only_estimate`.
    """
    entries = read_ledger(ledger)
    told = circumstances(runs[0].places.data)
    left = [run for run in runs if not any(run.is_in(entry, told["data"]) for entry in entries)]
    if len(left) < len(runs):
        print(f"{len(runs) - len(left)} of {len(runs)} runs are in {ledger}", file=output)
    # What the ledger has of another folder must be made again where others start from it.
    used = [step for run in left for step in run.steps[0].after if step.result() is None]
    steps = [
        *(step for step in used if all(step not in run.steps for run in left)),
        *dict.fromkeys(s for r in left for s in r.steps),
    ]
    for run in left:
        begun = read_json(run.places.out / BEGUN)
        if begun and begun.get("key") != run.steps[0].key:
            raise UserError(f"{run.places.out} was begun with another command or data; name another OUT, or delete it")
    names, gpus = _gpus(runs, steps)
    jobs = jobs or (len(names) // max(1, *gpus.values()) if names else cores())
    if estimates or only_estimate:
        try:
            _estimate(left, entries, jobs, output, {VARIABLE: ",".join(names)} if names else {})
        except UserError as error:  # the others can be trained
            if only_estimate:
                raise
            print(error, file=output)
    if only_estimate or not left:
        return

    def keep(step: Step) -> None:
        for run in left:
            if step in run.steps and all(each.result() is not None for each in run.steps):
                append_entry(ledger, run.entry(told))
                print(f"{run.name}, seed {run.seed}: in {ledger}", file=output)

    mark(out, MARK)
    folders = {step: run.places.out for run in runs for step in run.steps}
    runner = RowRunner(jobs, output, folders, gpus, Devices(names), keep)
    try:
        runner.run(steps)
    finally:
        runner.release()
    _keep_what_was_finished_before(left, ledger, told)
    if runner.failed:
        number = f"{len(runner.failed)} of {len(steps)} commands"
        raise UserError("\n  ".join([f"{number} failed or were not run:", *runner.failed.values()]))


def _keep_what_was_finished_before(runs: Sequence[Run], ledger: Path, told: dict[str, Any]) -> None:
    """Adds what an earlier call finished, and was ended before it wrote it down."""
    for run in runs:
        if any(step.result() is None for step in run.steps) or _is_kept(run, ledger, told):
            continue
        lock = take(lock_of(run.places.out))
        if lock is not None:  # else another process is about to
            if not _is_kept(run, ledger, told):
                append_entry(ledger, run.entry(told))
            os.close(lock)


def _is_kept(run: Run, ledger: Path, told: Mapping[str, Any]) -> bool:
    return any(run.is_in(entry, told["data"]) for entry in read_ledger(ledger))


def _gpus(runs: Sequence[Run], steps: Sequence[Step]) -> tuple[list[str], dict[Step, int]]:
    """The GPUs that there are for the steps, and how many each gets. Raises UserError if a training needs more."""
    uses = [step for step in steps if "--cpu" not in step.command]
    names = visible() if uses else []
    trains = positive(os.environ, "GPUS")
    if names and trains > len(names):
        raise UserError(f"GPUS is {trains}; it must be at most {len(names)}, as there are GPUs: {', '.join(names)}")
    trainings = {run.steps[0] for run in runs}
    return names, {step: 0 if not names or step not in uses else trains if step in trainings else 1 for step in steps}


def _estimate(
    left: Sequence[Run], entries: Sequence[Entry], jobs: int, output: TextIO, environment: Mapping[str, str]
) -> None:
    """Says how long it will take: by what the ledger has of a row, else by a few updates with this environment."""
    hours: dict[str, float] = {}
    left = list({run.steps[0]: run for run in reversed(left)}.values())[::-1]  # of each training one
    for run in left:
        if run.name not in hours and run.updates is not None:
            before = [entry.seconds for entry in entries if (entry.table, entry.row) == (run.table, run.name)]
            seconds = before[-1] if before else run.updates * _seconds_of_an_update(run, environment)
            hours[run.name] = seconds / 3600
    for name, each in hours.items():
        seeds = [str(run.seed) for run in left if run.name == name]
        print(f"{name}: about {each:.1f} hours for each of seeds {', '.join(seeds)}", file=output)
    total = sum(hours.get(run.name, 0.0) for run in left)
    if left:
        unknown = " and what has no --max-update" if any(run.name not in hours for run in left) else ""
        print(f"all: about {total / jobs:.1f} hours of training with {jobs} at a time{unknown}", file=output)
        output.flush()


def _seconds_of_an_update(run: Run, environment: Mapping[str, str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        words = [folder if word == str(run.places.out) else word for word in run.training.words]
        # What it starts from may not be trained yet.
        of_source = ("--transfer-from .*", "--finetune-from-model .*", "--criterion attention_transfer")
        for at in range(len(words) - 2, -1, -1):
            if any(re.fullmatch(option, " ".join(words[at : at + 2])) for option in of_source):
                del words[at : at + 2]
        words += ["--max-update", str(TRIED), "--log-interval", str(TRIED // 3), "--no-save", "--disable-validation"]
        env = os.environ | one_thread() | environment
        tried = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    steps = parse_training(tried.stdout + tried.stderr).updates_per_second
    if tried.returncode or not steps:
        end = "".join(f"\n  | {line[:300]}" for line in (tried.stdout + tried.stderr).splitlines()[-8:])
        raise UserError(f"{run.name} could not be trained for {TRIED} updates{end}")
    return 1 / steps
