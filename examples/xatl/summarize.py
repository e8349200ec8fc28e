#!/usr/bin/env python
"""Makes Choi's Tables 2, 3 and 4, and his Figure 1, of the results of benchmarks.sh in OUT.

    summarize.py OUT [MODEL ...] [--markdown FILE] [--figure FILE]

OUT has a folder for each model, named as the row that ../reproduce.py trained, with benchmarks.json in it and, of other
checkpoints, benchmarks.NAME.json. Above each measured row stands the paper's. A model of another name comes last. The
figure has the average over the tokens of the training, of which an update of a row reads 1024 x 2048, a point for each
checkpoint that was scored.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import ArgumentParser, run_to_the_end
from common.figures import new_figure, plain, save_figure
from common.files import UserError, write_whole
from common.tables import format_table
from papers.choi import MEASURES, TABLE_4, TABLES
from papers.language_models import XATL_400M

METRICS = {
    "LAMBADA": ("lambada_openai", "acc"),
    "HellaSwag": ("hellaswag", "acc_norm"),
    "PIQA": ("piqa", "acc"),
    "ARC-E": ("arc_easy", "acc"),
    "ARC-C": ("arc_challenge", "acc_norm"),
    "WinoGrande": ("winogrande", "acc"),
}
"""lm_eval's names for the paper's measures, but for their average."""
PERPLEXITY = "LAMBADA ppl"
HERE, PAPER = "here", "the paper"


@dataclass
class Scored:
    """A checkpoint: after how many updates of the training it was written, and its scores by `MEASURES` and
    `PERPLEXITY`."""

    updates: int | None
    scores: dict[str, float]


def main(arguments: list[str] | None = None) -> int:
    """Prints the tables; returns the exit status."""
    parser = ArgumentParser(description="Tables and a figure of benchmarks.")
    parser.add_argument("out", type=Path, metavar="OUT", help="holds one folder for each model")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="names of folders in OUT (default: all)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there too")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the averages (PNG)")
    options = parser.parse_args(arguments)
    return run_to_the_end(lambda: summarize(options.out, options.models, options.markdown, options.figure))


def summarize(out: Path, names: Sequence[str], markdown: Path | None, figure: Path | None) -> None:
    """Raises UserError if there is nothing to show."""
    if not out.is_dir():
        raise UserError(f"there is no folder {out}")
    names = names or sorted({file.parent.name for file in out.glob("*/benchmarks*.json")})
    runs = {name: read_run(out / name) for name in names}
    if not any(runs.values()):
        raise UserError(f"{out} holds no folder with benchmarks.json")
    tables = format_tables(runs)
    print(tables)
    if markdown:
        write_whole(markdown, tables + "\n")
    if figure:
        draw_averages(runs, figure)


def read_run(folder: Path) -> list[Scored]:
    """The results in `folder`, in the order of their updates, but the one that tables show first: benchmarks.json, or
    else the latest. Prints the files that cannot be read, or are of a part of the data.
    """
    found: dict[str, Scored] = {}
    for file in sorted(folder.glob("benchmarks*.json")):
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
            found[file.name] = read_result(result)
        except (ValueError, KeyError, TypeError):
            print(f"summarize.py: {file} is damaged: delete it and score again", file=sys.stderr)
            continue
        if limit := result["config"]["limit"]:
            print(f"summarize.py: {file} is of a part of the data, --limit {limit:g}", file=sys.stderr)
    if not found:
        print(f"summarize.py: {folder} holds no benchmarks.json: {folder.name} was not scored", file=sys.stderr)
    checkpoints = sorted(found.values(), key=lambda scored: scored.updates or 0)
    return [found.get("benchmarks.json", checkpoints[-1]), *checkpoints] if checkpoints else []


def read_result(result: dict[str, Any]) -> Scored:
    """Reads a result of lm_eval. Raises ValueError, KeyError or TypeError if it is not that."""
    found = result["results"]
    scores = {name: 100 * found[task][f"{kind},none"] for name, (task, kind) in METRICS.items() if task in found}
    if len(scores) == len(METRICS):
        scores["average"] = sum(scores.values()) / len(scores)
    if "lambada_openai" in found:
        scores[PERPLEXITY] = found["lambada_openai"]["perplexity,none"]
    return Scored(result["config"].get("updates"), scores)


def format_tables(runs: Mapping[str, Sequence[Scored]]) -> str:
    """The paper's tables of which there is a model, with their names, and then all other models."""
    by_name = {name: scored[0] for name, scored in runs.items() if scored}
    texts, told = [], set()
    for key, table in TABLES.items():
        rows = dict(table.rows)
        if key == "choi-table3":  # the one that it shares with Table 2
            rows["400m-ffn-retnet"] = TABLES["choi-table2"].rows["400m-ffn-retnet"]
        if not by_name.keys() & rows.keys():
            continue
        lines = []
        for name, row in rows.items():
            lines += _pair(f"`{name}`, {row.model}", row.numbers, by_name.get(name), MEASURES)
        texts.append(_table(table.title, MEASURES, lines))
        told |= rows.keys()
    if any(row.row in by_name for row in TABLE_4):
        measures, lines = (PERPLEXITY, *MEASURES), []
        for row in TABLE_4:
            lines += _pair(f"{row.model}, {row.tokens}", row.numbers.split(), by_name.get(row.row or ""), measures)
        texts.append(_table("Choi 2024, Table 4: beside published models", measures, lines))
    measures = (PERPLEXITY, *MEASURES)
    others = [_measured(name, scored, measures) for name, scored in by_name.items() if name not in told]
    if others:
        texts.append(_table("Other models", measures, others))
    return "\n\n".join(texts)


def _table(title: str, measures: Sequence[str], rows: list[list[str]]) -> str:
    return f"{title}\n\n{format_table(['model', 'whose', 'updates', *measures], rows)}"


def _pair(name: str, numbers: Sequence[str], scored: Scored | None, measures: Sequence[str]) -> list[list[str]]:
    """The paper's row and, if there is one, the measured one."""
    paper = [name, PAPER, "", *numbers]
    return [paper, _measured("", scored, measures)] if scored else [paper]


def _measured(name: str, scored: Scored, measures: Sequence[str]) -> list[str]:
    return [name, HERE, _shown(scored.updates, ","), *(_shown(scored.scores.get(m), ".2f") for m in measures)]


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def draw_averages(runs: Mapping[str, Sequence[Scored]], path: Path) -> None:
    """Draws the average of each model's checkpoints over the tokens that it had read, and saves a PNG."""
    figure, axis = new_figure(figsize=(7, 4.6))
    # The recipes of all sizes have the same batch.
    tokens_per_update = XATL_400M.batch * XATL_400M.length
    for name, (_, *checkpoints) in ((name, scored) for name, scored in runs.items() if scored):
        points = [
            (scored.updates * tokens_per_update / 1e9, scored.scores["average"])
            for scored in checkpoints
            if scored.updates is not None and "average" in scored.scores
        ]
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=1.4, label=name)
    if not axis.lines:
        raise UserError("no checkpoint has both an average and its number of updates")
    axis.set_xlabel("tokens of training, in billions")
    axis.set_ylabel("average accuracy of six tests, in %")
    axis.set_xlim(left=0)
    axis.legend(frameon=False)
    plain(axis)
    save_figure(figure, path)


if __name__ == "__main__":
    sys.exit(main())
