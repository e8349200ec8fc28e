"""The smallest grid that shows both effects of the synthetic experiments: the program of `make demo-synthetic`.

    python examples/synthetic/demo.py [--out FOLDER] [--jobs N]

Finished points are kept in --out: the same call again, also after an interruption, goes on from there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, for the packages in it
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the plugin

from common.command_line import ArgumentParser, add_jobs, add_out, run_to_the_end
from common.commands import require_packages, shown
from common.steps import claim

from synthetic.figures import draw_figures
from synthetic.grid import Grid
from synthetic.models import MODELS
from synthetic.results import Result, file_of, loss_table, read_results, shown_loss
from synthetic.training import TARGET, Point

MARK = "made-by-the-synthetic-demo"
POINTS = [
    *(Point(1, model, size) for model in ("softmax", "linear", "dpfp-1") for size in (20, 60, 100, 140)),
    *(Point(2, model, 20) for model in ("sum-dpfp-1", "delta-dpfp-1")),
]


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo; returns the exit status."""
    parser = ArgumentParser(
        description="Trains a few models to retrieve values by their keys, and shows how many pairs their states "
        "hold and which update rule can replace values. The same call again goes on where one was interrupted."
    )
    add_out(parser, Path(__file__).resolve().parent / "demo-out")
    add_jobs(parser)
    options = parser.parse_args(arguments)
    return run_to_the_end(lambda: work(options.out, options.jobs))


def work(out: Path, jobs: int) -> None:
    """Trains, draws and reports. Raises UserError if the folder cannot be used, or a process dies."""
    require_packages("matplotlib")
    started = time.monotonic()
    with claim(out, MARK):
        Grid(out, jobs, sys.stdout).run(POINTS)
        results = {setting: list(read_results(file_of(out, setting)).values()) for setting in MODELS}
        drawn = draw_figures(results, out, numbers=(2, 3))
        print("", *report(results), "", *(f"figure: {shown(path.resolve())}" for path in drawn), sep="\n")
        print(f"done in {time.monotonic() - started:.0f} s")


def report(results: Mapping[int, Sequence[Result]]) -> Iterator[str]:
    """The lowest losses of each setting, and a sentence about them."""
    yield f"""Setting 1, capacity: lowest evaluation loss, by the number S of pairs to remember

{loss_table(results[1])}
"""
    says = []
    for name, model in MODELS[1].items():
        losses = {r.point.size: r.best_loss for r in results[1] if r.point.model == name}
        failed = [size for size in sorted(losses) if losses[size] is None or losses[size] >= TARGET]
        if losses:
            told = f"makes errors from S = {failed[0]} on" if failed else "at none of these sizes"
            says.append(f"{model.title} {told}")
    loss = {result.point.model: shown_loss(result.best_loss) for result in results[2]}
    yield f"""A loss of 0.5 is that of retrieving nothing. Above {TARGET}: {", ".join(says)}.

Setting 2, update rules: 40 pairs of 20 keys, so that most keys get new values on the way

{loss_table(results[2])}

The sum rule, which can only add to a key's value, ends at {loss["sum-dpfp-1"]}; the delta rule, which replaces it, at \
{loss["delta-dpfp-1"]}."""


if __name__ == "__main__":
    sys.exit(main())
