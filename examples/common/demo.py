"""Steps that are common to the demos which train with fairseq."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.commands import ROOT, command, cores, shown
from common.fairseq_logs import describe_training, read_nothing, read_training
from common.figures import draw_trainings
from common.files import write_whole
from common.steps import Runner, Step, write_json

SPLITS = ("train", "valid", "test")
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""Two commands of one thread each make better use of two cores than one of two threads."""

# Without a buffer for data: the thread that fills one may be at work when a training ends within an epoch, and Python
# then sometimes aborts instead of ending.
TRAINING = """
    --optimizer adam --adam-betas '(0.9, 0.98)' --lr-scheduler cosine
    --num-workers 0 --data-buffer-size 0 --log-format json --no-epoch-checkpoints --keep-interval-updates 1
"""
NEVER = 1_000_000
"""Epochs between validations: they are counted in updates, for an epoch may be short or endless."""


@dataclass(frozen=True)
class Model:
    """One of the models that are compared; the options are those in which they differ."""

    title: str
    options: str
    carries: bool = False


class Demo:
    """All that is done in one folder.

    `options`: of the command line. `models`: all that there are, by name; `options` says which are trained. `claimed`:
    a descriptor that every command inherits (`steps.claim`).
    """

    def __init__(self, options: argparse.Namespace, models: Mapping[str, Model], claimed: int) -> None:
        self.out = options.out.resolve()
        self.updates = options.updates
        self.seed = options.seed
        self.models = {name: models[name] for name in models if name in options.models}
        self.runner = Runner(ROOT, cores(), sys.stdout, ENVIRONMENT, keep_open=[claimed])
        self.started = time.monotonic()

    def preprocessing(self, texts: Mapping[str, Path], *options: str, **others: Any) -> Step:
        """A step of `fairseq-preprocess`; `texts` are the prefixes of the splits, `others` what else `Step` takes."""
        folder = self.out / "bin"
        words = [word for split, path in texts.items() for word in (f"--{split}pref", path)]
        words = command("fairseq-preprocess", *options, *words, "--destdir", folder)
        return Step("turning the text into numbers", folder, words, read_nothing, **others)

    def training(self, title: str, folder: Path, binarized: Step, *options: str, warmup: int, interval: int) -> Step:
        """A step of `fairseq-train`.

        `title`: what is trained, for people. `folder`: for the checkpoints. `binarized`: the step that makes the data.
        `options`: all that `TRAINING` and the schedule leave open. `warmup`: how many of the updates the learning rate
        takes to its highest, at most. `interval`: updates between validations, each of which leaves a checkpoint.
        """
        schedule = (
            f"--max-update {self.updates} --warmup-updates {min(warmup, self.updates // 5)} "
            f"--log-interval {max(1, min(10, self.updates // 10))} --seed {self.seed} "
            f"--validate-interval {NEVER} --validate-interval-updates {interval} "
            f"--save-interval {NEVER} --save-interval-updates {interval}"
        )
        return Step(
            f"training the {title}",
            folder,
            command("fairseq-train", binarized.folder, *options, TRAINING, schedule, "--save-dir", folder),
            read_training,
            describe_progress=lambda log: describe_training(log, self.updates),
            after=[binarized],
            resumes=True,
        )

    def using(self, program: str, title: str, folder: Path, trained: Step, *options: str | Path, **others: Any) -> Step:
        """A step of a program of fairseq that uses a trained model and its data."""
        [binarized] = trained.after
        checkpoint = trained.folder / "checkpoint_best.pt"
        words = command(program, binarized.folder, options[0], "--path", checkpoint, *options[1:])
        return Step(title, folder, words, after=[binarized, trained], **others)

    def report(
        self, rows: Sequence[Any], curves: dict[str, dict[str, Any]], top: float, lines: Sequence[str], **levels: float
    ) -> None:
        """Writes results.json, curves.png and table.md, and prints what the last one says.

        `rows`: of the table, dataclasses. `curves`: by title, what `fairseq_logs.read_training` returns. `lines`: the
        table, and what is to be said of it. `top`, `levels`: see `draw_trainings`.
        """
        write_json(self.out / "results.json", {"rows": [asdict(row) for row in rows], "curves": curves})
        perplexities = {title: (curve["train_ppl"], curve["valid_ppl"]) for title, curve in curves.items()}
        draw_trainings(perplexities, self.out / "curves.png", top=top, levels=levels)
        table = self.out / "table.md"
        write_whole(table, "\n".join(lines) + "\n")
        self.runner.say("\n" + "\n".join(lines))
        self.runner.say(f"\ntable:  {shown(table)}\ncurves: {shown(self.out / 'curves.png')}")
        self.runner.say(f"done in {time.monotonic() - self.started:.0f} s")
