#!/usr/bin/env python
"""Makes a table, and curves, of what multi30k.sh, or ../reproduce.py for the rows of Table 1, left in RUNS.

    summarize.py RUNS [MODEL ...] [--markdown FILE] [--figure FILE]

RUNS has one folder for each model, with train.log and what generate.sh wrote in it. Without MODEL all of them are
listed. Big models in folders with the name of a row of Table 1, as dpfp-256, have the paper's BLEU beside their own.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import summaries
from common.tables import format_table
from papers.schlag import TABLES

SUBSETS = ("valid", "test")
PAPER = {name: tuple(map(float, row.numbers)) for name, row in TABLES["schlag-table1"].rows.items()}
"""Table 1: BLEU on valid and on test."""
ORDER = ("softmax", *PAPER, "favor", "dpfp")
"""Of the table's rows, with the models of multi30k.sh among them."""
PAPERS_ARCHITECTURE = "fast_weight_transformer_wmt_en_de_big"


@dataclass
class ScoredRun(summaries.Run):
    """What one model left behind; its speed is in target subwords per second.

    `results`: what generate.sh wrote, by subset. `of_paper`: whether it is the paper's architecture.
    """

    of_paper: bool = False
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def missing(self) -> bool:
        return self.training.parameters is None and not self.results

    @property
    def papers_bleu(self) -> dict[str, float]:
        """The paper's BLEU by subset, if it has this model."""
        return dict(zip(SUBSETS, PAPER[self.name], strict=True)) if self.of_paper and self.name in PAPER else {}


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    options = summaries.summary_parser("Table and curves of trained translation models.", "RUNS").parse_args(arguments)

    def find(folder: Path) -> list[ScoredRun]:
        return [read_run(folder / name) for name in options.models or find_models(folder)]

    runs = summaries.summarize(options, find, "a training or a result", format_runs)
    if options.figure:
        summaries.draw_curves(runs, options.figure, "perplexity of subwords")
    return 0


def find_models(folder: Path) -> list[str]:
    """The folders with a training or a result in them: those in `ORDER`, then the others."""
    found = {path.parent.name for pattern in ("train.log", "generate-*.json") for path in folder.glob(f"*/{pattern}")}
    return [*(name for name in ORDER if name in found), *sorted(found - set(ORDER))]


def read_run(folder: Path) -> ScoredRun:
    """Reads what is in `folder`; what cannot be read is among the problems of the result."""
    run = ScoredRun(folder.name)
    log = folder / "train.log"
    if log.exists():
        run.of_paper = f"arch='{PAPERS_ARCHITECTURE}'" in run.read_training(log)
    else:
        run.problems.append(f"{log} is missing")
    for subset in SUBSETS:
        path = folder / f"generate-{subset}.json"
        if path.exists():
            try:
                result = json.loads(path.read_text(encoding="utf-8"))
                for name in ("bleu", "compound_split_bleu", "tokens_per_second"):
                    float(result[name])
                for name in ("signature", "compound_split_signature", "options"):
                    result[name]
                run.results[subset] = result
            except (ValueError, KeyError, TypeError):
                run.problems.append(f"{path} is no result of generate.sh: delete it and generate again")
        elif run.training.finished:
            run.problems.append(f"{path} is missing: {folder.name} is trained, but was not scored on {subset}")
    return run


def format_runs(runs: list[ScoredRun]) -> str:
    """A table in markdown, with the paper's columns if one of the models is in its table."""
    with_paper = any(run.papers_bleu for run in runs)
    columns = [f"{subset} BLEU{kind}" for subset in SUBSETS for kind in ([", paper"] if with_paper else []) + [""]]
    header = ["model", "parameters", "updates", *columns, "test, compound-split"]
    header += ["train subwords/s", "generate subwords/s"]
    rows = []
    for run in runs:
        if run.missing:
            rows.append([run.name, "missing", *[summaries.ABSENT] * (len(header) - 2)])
            continue
        scores = []
        for subset in SUBSETS:
            scores += [summaries.shown(run.papers_bleu.get(subset), ".1f")] if with_paper else []
            scores.append(summaries.shown(run.results.get(subset, {}).get("bleu"), ".2f"))
        test = run.results.get("test", {})
        rows.append(
            [
                run.name,
                summaries.shown(run.training.parameters, ","),
                summaries.shown(run.training.updates or None, ",") + ("" if run.training.finished else " (unfinished)"),
                *scores,
                summaries.shown(test.get("compound_split_bleu"), ".2f"),
                summaries.shown(run.training.speed, ",.0f"),
                summaries.shown(test.get("tokens_per_second"), ",.0f"),
            ]
        )
    return "\n".join([format_table(header, rows), "", *format_notes(runs)]).rstrip()


def format_notes(runs: list[ScoredRun]) -> list[str]:
    """What the numbers are: signatures and options, with the models they are of if these differ."""
    lines = []
    for title, key in (
        ("BLEU", "signature"),
        ("Compound-split BLEU", "compound_split_signature"),
        ("Generated with", "options"),
    ):
        users: dict[str, list[str]] = {}
        for run in runs:
            for subset, result in run.results.items():
                value = result[key]
                users.setdefault(" ".join(value) if isinstance(value, list) else value, []).append(
                    f"{run.name} {subset}"
                )
        for value, names in users.items():
            who = f" ({', '.join(names)})" if len(users) > 1 else ""
            lines.append(f"- {title}{who}: `{value}`")
    return lines


if __name__ == "__main__":
    sys.exit(main())
