"""Trains any part of the grid of the synthetic experiments, and draws the figures of finished points.

    python examples/synthetic/run.py --setting 1|2 [--sizes S ...] [--models NAME ...] [--out FOLDER] [--jobs N] ...
    python examples/synthetic/run.py --draw [--out FOLDER] [--figures FOLDER]

Every finished point is a line of FOLDER/setting1.jsonl or FOLDER/setting2.jsonl. The same call again, also after an
interruption, goes on with the points that have none.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, for the packages in it
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the plugin

import torch
from common.command_line import ArgumentParser, add_jobs, add_out, positive, run_to_the_end
from common.commands import require_packages, shown
from common.files import UserError
from common.steps import claim

from synthetic.figures import draw_features, draw_figures
from synthetic.grid import Grid
from synthetic.models import MODELS
from synthetic.results import file_of, loss_table, one_of_each_seed, read_results
from synthetic.retrieval import SETTINGS
from synthetic.training import MAX_STEPS, Point

MARK = "made-by-the-synthetic-experiments"
SIZES = {1: range(20, 601, 20), 2: range(20, 201, 20)}
LARGEST = 10_000
"""Of S: an evaluation holds S numbers for each of S queries."""


def main(arguments: list[str] | None = None) -> int:
    """Trains or draws; returns the exit status."""
    options = _parse(arguments)
    if options.draw:
        return run_to_the_end(lambda: draw(options.out, options.figures or options.out))
    return run_to_the_end(lambda: train(options))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    names = {setting: ", ".join(models) for setting, models in MODELS.items()}
    parser = ArgumentParser(
        description="Trains models to retrieve values by their keys (Schlag et al. 2021, Sec. 6.1), a point for each "
        "model and each number S of keys, and draws the paper's Figures 1 to 5. The same call again goes on where one "
        "was interrupted.",
        epilog="; ".join(f"models of setting {setting}: {models}" for setting, models in names.items()),
    )
    either = parser.add_mutually_exclusive_group(required=True)
    help = "which to train: " + "; ".join(f"{number}, {text}" for number, text in SETTINGS.items())
    either.add_argument("--setting", type=int, choices=SETTINGS, help=help)
    either.add_argument("--draw", action="store_true", help="train nothing; tables and figures of finished points")
    help = "numbers of keys (default: 20 to 600 by 20 in setting 1, 20 to 200 by 20 in setting 2)"
    parser.add_argument("--sizes", nargs="+", type=_size, metavar="S", help=help)
    parser.add_argument("--models", nargs="+", metavar="NAME", help="which models (default: all of the setting)")
    help = "pairs in a sequence that evaluates setting 2: 2S as in training (default), or S as in the authors' program"
    parser.add_argument("--evaluate-length", choices=["S", "2S"], help=help)
    add_out(parser, Path(__file__).resolve().parent / "out")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="where --draw puts figures (default: --out)")
    add_jobs(parser)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: cpu)")
    parser.add_argument("--seed", type=positive, default=1, metavar="N", help="of all that is drawn (default: 1)")
    help = f"where a training ends if nothing else ends it (default: {MAX_STEPS})"
    parser.add_argument("--max-steps", type=positive, default=MAX_STEPS, metavar="N", help=help)
    options = parser.parse_args(arguments)
    if options.draw and (options.sizes or options.models):
        parser.error("--sizes and --models are for training; --draw draws all that is finished")
    if options.evaluate_length and options.setting != 2:
        parser.error("--evaluate-length goes with --setting 2")
    if not options.draw:
        if options.figures:
            parser.error("--figures goes with --draw")
        known = MODELS[options.setting]
        for name in options.models or ():
            if name not in known:
                parser.error(
                    f"argument --models: {name!r} is no model of setting {options.setting}; "
                    f"it must be one of {', '.join(known)}"
                )
    return options


def train(options: argparse.Namespace) -> None:
    """Trains the chosen points. Raises UserError if there is no such device, the folder cannot be used, or a process
    dies.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device is 'cuda', but torch finds no GPU here; leave it out to train on the CPU")
    short = "S" if options.evaluate_length == "S" else ""
    points = [
        Point(options.setting, model, size, options.seed, options.max_steps, options.device, short)
        for size in dict.fromkeys(options.sizes or SIZES[options.setting])
        for model in dict.fromkeys(options.models or MODELS[options.setting])
    ]
    with claim(options.out, MARK):
        Grid(options.out, options.jobs, sys.stdout).run(points)


def draw(folder: Path, figures: Path) -> list[Path]:
    """Draws the finished points of `folder`. Raises UserError if there is nothing to draw, or a file of results cannot
    be used.
    """
    require_packages("matplotlib")
    found = {setting: read_results(file_of(folder, setting)).values() for setting in SETTINGS}
    if not any(found.values()):
        raise UserError(f"{folder} has no finished points to draw")
    results = {setting: one_of_each_seed(points) for setting, points in found.items()}
    figures.mkdir(parents=True, exist_ok=True)
    drawn = [draw_features(figures), *draw_figures(results, figures)]
    for setting, finished in results.items():
        if finished:
            print(f"Setting {setting}, lowest evaluation losses:\n\n{loss_table(finished)}\n")
        if left_out := len(found[setting]) - len(finished):
            print(f"Left out, as their seeds have a point of more steps or on the CPU: {left_out} of the points\n")
    for path in drawn:
        print(f"figure: {shown(path.resolve())}")
    return drawn


def _size(text: str) -> int:
    size = positive(text)
    if size > LARGEST:
        raise argparse.ArgumentTypeError(f"{text} is more than {LARGEST}")
    return size


if __name__ == "__main__":
    sys.exit(main())
