#!/usr/bin/env python
"""The data of Choi's six benchmarks: sees to it that all are there, for benchmarks.sh.

    benchmark_data.py TASKS [FOLDER]

Without FOLDER they are those of the hub, which are downloaded where they are not in the cache. FOLDER has them in
files, one for each benchmark; then TASKS, a new folder, gets lm_eval's tasks, changed to read these.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import ArgumentParser, run_to_the_end
from common.files import UserError, read_lines


@dataclass(frozen=True)
class Benchmark:
    """A task of lm_eval and its data."""

    config: str  # the task's file among lm_eval's
    hub: tuple[str, str | None]  # the name of its data on the hub, and of their part
    split: str  # the one that is scored
    fields: str  # of a line in a file, for people
    fits: Callable[[Any], bool]  # whether a line has them; if not, it may raise


def _texts(line: Any, *names: str) -> bool:
    return all(isinstance(line[name], str) for name in names)


_ARC_FIELDS = "question, choices (an object of two lists, text and label) and answerKey, one of the labels"


def _fits_arc(line: Any) -> bool:
    choices = line["choices"]
    return (
        _texts(line, "question")
        and all(isinstance(text, str) for text in choices["text"])
        and len(choices["text"]) == len(choices["label"])
        and line["answerKey"] in choices["label"]
    )


BENCHMARKS = {
    "lambada_openai": Benchmark(
        "lambada/lambada_openai.yaml",
        ("EleutherAI/lambada_openai", "default"),
        "test",
        "text, a passage of several words",
        lambda line: len(line["text"].split()) > 1,
    ),
    "hellaswag": Benchmark(
        "hellaswag/hellaswag.yaml",
        ("Rowan/hellaswag", None),
        "validation",
        "activity_label, ctx_a, ctx_b, endings (a list) and label, the number of the right one",
        lambda line: (
            _texts(line, "activity_label", "ctx_a", "ctx_b")
            and all(isinstance(text, str) for text in line["endings"])
            and int(line["label"]) in range(len(line["endings"]))
        ),
    ),
    "piqa": Benchmark(
        "piqa/piqa.yaml",
        ("baber/piqa", None),
        "validation",
        "goal, sol1, sol2 and label, 0 or 1",
        lambda line: _texts(line, "goal", "sol1", "sol2") and line["label"] in (0, 1),
    ),
    "arc_easy": Benchmark("arc/arc_easy.yaml", ("allenai/ai2_arc", "ARC-Easy"), "test", _ARC_FIELDS, _fits_arc),
    "arc_challenge": Benchmark(
        "arc/arc_challenge.yaml", ("allenai/ai2_arc", "ARC-Challenge"), "test", _ARC_FIELDS, _fits_arc
    ),
    "winogrande": Benchmark(
        "winogrande/default.yaml",
        ("allenai/winogrande", "winogrande_xl"),
        "validation",
        'sentence, in which _ stands for option1 or option2, and answer, "1" or "2"',
        lambda line: (
            _texts(line, "sentence", "option1", "option2") and "_" in line["sentence"] and line["answer"] in ("1", "2")
        ),
    ),
}
"""By lm_eval's names for them."""


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = ArgumentParser(description="Sees to it that the benchmarks' data are there.")
    parser.add_argument("tasks", type=Path, metavar="TASKS", help="gets the tasks that read FOLDER")
    parser.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help="has a file for each benchmark")
    options = parser.parse_args(arguments)

    def work() -> None:
        if options.folder is None:
            find_on_hub()
        else:
            check_files(options.folder)
            write_tasks(options.tasks, options.folder)

    return run_to_the_end(work)


def find_on_hub() -> None:
    """Loads all from the hub or the cache. Raises UserError naming those that neither has."""
    missing = [f"{row.hub[0]} (or {name}.jsonl)" for name, row in BENCHMARKS.items() if not _is_reached(*row.hub)]
    if missing:
        raise UserError(
            f"these data sets are not on this machine, and the hub cannot be reached: {', '.join(missing)}; DATA in "
            "the environment names a folder that has them in files"
        )


def _is_reached(data: str, part: str | None) -> bool:
    import datasets

    try:
        datasets.load_dataset(data, part)
    except OSError:
        return False
    return True


def check_files(folder: Path) -> None:
    """Checks every line. Raises UserError naming all files that are missing, or the error of one."""
    files = {name: folder / f"{name}.jsonl" for name in BENCHMARKS}
    if missing := [file.name for file in files.values() if not file.is_file()]:
        raise UserError(f"DATA is {folder}, which holds no {', '.join(missing)}")
    for name, file in files.items():
        number = 0
        for number, (text, _) in enumerate(read_lines(file), 1):
            try:
                fits = BENCHMARKS[name].fits(json.loads(text))
            except (ValueError, KeyError, TypeError, AttributeError):
                fits = False
            if not fits:
                raise UserError(f"{file}: line {number} must be a JSON object with {BENCHMARKS[name].fields}")
        if not number:
            raise UserError(f"{file} is empty")


def write_tasks(tasks: Path, folder: Path) -> None:
    """Writes a task of the same name for each of lm_eval's: the same but for its data."""
    import lm_eval.tasks

    tasks.mkdir(parents=True)
    for name, benchmark in BENCHMARKS.items():
        file, cache = (str(path.resolve()) for path in (folder / f"{name}.jsonl", tasks / "cache"))
        config = {
            "include": str(Path(lm_eval.tasks.__file__).parent / benchmark.config),
            "task": name,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {benchmark.split: file}, "cache_dir": cache},
            "training_split": None,
            "validation_split": None,
            f"{benchmark.split}_split": benchmark.split,
        }
        (tasks / f"{name}.yaml").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")  # JSON is YAML


if __name__ == "__main__":
    sys.exit(main())
