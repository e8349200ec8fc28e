#!/usr/bin/env python
"""Makes a table, and curves, of what multi30k.sh or the scripts of Table 1's rows left in RUNS.

    summarize.py RUNS [MODEL ...] [--markdown FILE] [--figure FILE]

RUNS has one folder for each model, with train.log and what generate.sh wrote in it. Without MODEL all of them are
listed. Big models in folders with the name of a row of Table 1, as dpfp-256, have the paper's BLEU beside their own.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SUBSETS = ("valid", "test")
PAPER = {
    # Table 1: BLEU on valid and on test.
    "standard": (26.6, 27.7),
    "linear": (25.5, 26.8),
    "performer-64": (24.2, 24.4),
    "performer-256": (24.9, 25.3),
    "performer-512": (26.7, 27.7),
    "dpfp-256": (26.2, 26.9),
    "dpfp-512": (26.2, 27.1),
}
ORDER = ("softmax", *PAPER, "favor", "dpfp")
"""Of the table's rows, with the models of multi30k.sh among them."""
PAPERS_ARCHITECTURE = "fast_weight_transformer_wmt_en_de_big"
ABSENT = "–"


@dataclass
class Run:
    """What one model left behind.

    Attributes:
        train, valid: perplexity by update.
        speed: of training, in target subwords per second, in the middle of the training's reports.
        results: what generate.sh wrote, by subset.
        of_paper: whether it is the paper's architecture.
        problems: what is wrong with the files, for a person to read.
    """

    name: str
    parameters: int | None = None
    train: dict[int, float] = field(default_factory=dict)
    valid: dict[int, float] = field(default_factory=dict)
    speed: float | None = None
    finished: bool = False
    of_paper: bool = False
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def updates(self) -> int:
        return max([*self.train, *self.valid], default=0)

    @property
    def missing(self) -> bool:
        return self.parameters is None and not self.results

    @property
    def papers_bleu(self) -> dict[str, float]:
        """The paper's BLEU by subset, if it has this model."""
        return dict(zip(SUBSETS, PAPER[self.name], strict=True)) if self.of_paper and self.name in PAPER else {}


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(description="Table and curves of trained translation models.")
    parser.add_argument("runs", type=Path, metavar="RUNS", help="holds one folder for each model")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="names of folders in RUNS (default: all)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there too")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw training and validation curves (PNG)")
    options = parser.parse_args(arguments)

    if not options.runs.is_dir():
        print(f"summarize.py: there is no folder {options.runs}", file=sys.stderr)
        return 1
    runs = [read_run(options.runs / name) for name in options.models or find_models(options.runs)]
    for problem in (problem for run in runs for problem in run.problems):
        print(f"summarize.py: {problem}", file=sys.stderr)
    if all(run.missing for run in runs):
        print(f"summarize.py: {options.runs} holds no folder with a training or a result", file=sys.stderr)
        return 1
    table = "\n".join([*format_table(runs), "", *format_notes(runs)]).rstrip()
    print(table)
    if options.markdown:
        options.markdown.write_text(table + "\n", encoding="utf-8")
    if options.figure:
        draw_curves(runs, options.figure)
    return 0


def find_models(folder: Path) -> list[str]:
    """The folders with a training or a result in them: those in `ORDER`, then the others."""
    found = {path.parent.name for pattern in ("train.log", "generate-*.json") for path in folder.glob(f"*/{pattern}")}
    return [*(name for name in ORDER if name in found), *sorted(found - set(ORDER))]


def read_run(folder: Path) -> Run:
    """Reads what is in `folder`; what cannot be read is among the problems of the result."""
    run = Run(folder.name)
    log = folder / "train.log"
    if log.exists():
        _read_training(log, run)
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
        elif run.finished:
            run.problems.append(f"{path} is missing: {folder.name} is trained, but was not scored on {subset}")
    return run


def _read_training(log: Path, run: Run) -> None:
    speeds = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if found := re.search(r"num\. shared model params: ([\d,]+)", line):
            run.parameters = int(found[1].replace(",", ""))
        if f"arch='{PAPERS_ARCHITECTURE}'" in line:
            run.of_paper = True
        if "| done training in " in line:
            run.finished = True
        if found := re.search(r"\| (train_inner|valid) \| (\{.*)", line):
            run.finished = False  # of this call, which goes on where an earlier one ended
            try:
                values = json.loads(found[2])
                if found[1] == "valid":
                    run.valid[int(values["valid_num_updates"])] = float(values["valid_ppl"])
                else:
                    run.train[int(values["num_updates"])] = float(values["ppl"])
                    speeds.append(float(values["wps"]))
            except (ValueError, KeyError):
                run.problems.append(f"{log} has a damaged line: {line[:100]}")
    run.speed = statistics.median(speeds) if speeds else None
    if run.parameters is None:
        run.problems.append(f"{log} ends before the model was built")
    elif not run.finished:
        reached = "no validation yet" if not run.valid else f"last validation at update {max(run.valid)}"
        run.problems.append(f"{log} is of an unfinished training: it ends at update {run.updates}, {reached}")


def format_table(runs: list[Run]) -> list[str]:
    """Rows of markdown; with the paper's columns if one of the models is in its table."""
    with_paper = any(run.papers_bleu for run in runs)
    columns = [f"{subset} BLEU{kind}" for subset in SUBSETS for kind in ([", paper"] if with_paper else []) + [""]]
    header = ["model", "parameters", "updates", *columns, "test, compound-split"]
    header += ["train subwords/s", "generate subwords/s"]
    rows = [header, ["---", *["---:"] * (len(header) - 1)]]
    for run in runs:
        if run.missing:
            rows.append([run.name, "missing", *[ABSENT] * (len(header) - 2)])
            continue
        scores = []
        for subset in SUBSETS:
            scores += [_number(run.papers_bleu.get(subset), ".1f")] if with_paper else []
            scores.append(_number(run.results.get(subset, {}).get("bleu"), ".2f"))
        test = run.results.get("test", {})
        rows.append(
            [
                run.name,
                _number(run.parameters, ","),
                _number(run.updates or None, ",") + ("" if run.finished else " (unfinished)"),
                *scores,
                _number(test.get("compound_split_bleu"), ".2f"),
                _number(run.speed, ",.0f"),
                _number(test.get("tokens_per_second"), ",.0f"),
            ]
        )
    return [f"| {' | '.join(row)} |" for row in rows]


def _number(value: float | None, form: str) -> str:
    return ABSENT if value is None else format(value, form)


def format_notes(runs: list[Run]) -> list[str]:
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


def draw_curves(runs: list[Run], path: Path) -> None:
    """Draws perplexity over updates, training on the left and validation on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axis, kind in zip(axes, ("train", "valid"), strict=True):
        for number, run in enumerate(runs):
            curve = sorted(getattr(run, kind).items())
            if curve:
                updates, perplexities = zip(*curve, strict=True)
                marker = "o" if kind == "valid" or len(curve) == 1 else None
                axis.plot(updates, perplexities, f"C{number}", marker=marker, markersize=3, linewidth=1.4)
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(ScalarFormatter())
        axis.set_xlim(left=0)
        axis.set_xlabel("updates")
        axis.set_ylabel("perplexity of subwords (log scale)")
        axis.set_title("training" if kind == "train" else "validation", loc="left")
        axis.grid(color="0.9", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    names = [
        plt.Line2D([], [], color=f"C{number}", linewidth=2, label=run.name)
        for number, run in enumerate(runs)
        if run.train or run.valid
    ]
    figure.legend(handles=names, loc="outside lower center", ncols=min(len(names) or 1, 7), frameon=False)
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
