"""Draws what the memories of five papers write and read, a figure for each: docs/teach.md explains them.

    python examples/synthetic/lessons.py FOLDER

Nothing is trained. Writes teach-*.png into FOLDER, in some seconds.
"""

from __future__ import annotations

import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from common.command_line import ArgumentParser
from common.figures import Curve, draw_curves, new_figure, save_figure, say
from torch import Tensor

from fairseq_fastweights import ops
from synthetic.models import MODELS
from synthetic.retrieval import all_queries, draw_sequences

STEPS, KEY_DIM = 60, 128
WRITES = {5: 1.0, 25: -0.5}
"""The values of the key that is asked for after every step, by the step in which they are written."""
NEW_TEXT = 40
"""The step in which the gate of the gated delta rule closes: a new text begins."""
SMALL_KEY_DIM = 16
HEADS = 4
"""Of RetNet: head h keeps 1 - 2^(-5 - h) of its state at each step (Sun et al. 2023, Eq. 8)."""
CAPACITY_MODELS = ("linear", "dpfp-1", "dpfp-2", "dpfp-3", "favor-64")
PAIRS = (5, 10, 20, 40, 80, 160)


def stream() -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys (1, STEPS, 1, KEY_DIM) and values (1, STEPS, 1, 1): the key of `WRITES`, and others between."""
    torch.manual_seed(1)
    k = torch.nn.functional.normalize(torch.randn(1, STEPS, 1, KEY_DIM), dim=-1)
    v = torch.randint(0, 2, (1, STEPS, 1, 1)) - 0.5
    for step, value in WRITES.items():
        k[:, step], v[:, step] = torch.eye(KEY_DIM)[0], value
    return torch.eye(KEY_DIM)[0].expand_as(k), k, v


def outputs() -> dict[str, list[float]]:
    """The output for the key of `WRITES` after every step, by update rule; "written" is its latest value."""
    q, k, v = stream()
    beta, gate = torch.ones(1, STEPS, 1), torch.zeros(1, STEPS, 1)
    gate[:, NEW_TEXT] = -10
    read = {
        "sum rule": ops.sum_rule(q, k, v),
        "delta rule": ops.delta_rule(q, k, v, beta),
        "gated delta rule": ops.gated_delta_rule(q, k, v, beta, gate),
    }
    found = {name: y.flatten().tolist() for name, (y, _) in read.items()}
    latest = [0.0] * STEPS
    for step, value in WRITES.items():
        latest[step:] = [value] * (STEPS - step)
    return {"written": latest, **found}


def shares_left() -> dict[str, list[float]]:
    """The share of a value that each head of RetNet still reads, by the steps since it was written."""
    time = 8 * STEPS
    k = torch.eye(1, KEY_DIM).expand(1, time, HEADS, KEY_DIM)
    v = torch.zeros(1, time, HEADS, 1)
    v[:, 0] = 1
    decays = torch.log(1 - 2.0 ** (-5 - torch.arange(HEADS)))
    y, _ = ops.decay_rule(k, k, v, decays[:, None].expand(1, time, HEADS, KEY_DIM), None)
    return {f"head {head + 1}": y[0, :, head, 0].tolist() for head in range(HEADS)}


def right_answers() -> dict[str, list[float]]:
    """By memory, the share of keys whose own value is the largest part of the output, for each number of pairs."""
    return {name: [_right_answers(name, size) for size in PAIRS] for name in CAPACITY_MODELS}


def _right_answers(name: str, size: int) -> float:
    torch.manual_seed(1)
    pairs = draw_sequences(1, size, batch=64)
    keys = torch.randn(64, size, SMALL_KEY_DIM)  # every row has keys of its own
    queries, targets, _ = all_queries(pairs)
    k, q = (keys.gather(1, names[..., None].expand_as(keys)) for names in (pairs.keys, queries))
    y = MODELS[1][name].build(SMALL_KEY_DIM)(k, q, None, pairs.values, size)
    return float((y.argmax(-1) == targets).float().mean())


def _label(name: str) -> str:
    model = MODELS[1][name]
    told = "features" in model.title
    return model.title if told else f"{model.title}, {model.build(SMALL_KEY_DIM).features} features"


def draw(folder: Path) -> list[Path]:
    """Draws all figures into a folder; returns the files."""
    read, steps = outputs(), range(STEPS)
    asked = (
        f"One head, keys of {KEY_DIM} numbers, a pair a step. After every step the same key is asked for, which was "
        f"written in steps {' and '.join(map(str, WRITES))}; other pairs disturb it a little."
    )
    axis = {"xlabel": "step", "ylabel": "output for the key"}

    def lines(*names: str) -> dict[str, Curve]:
        return {name: list(zip(steps, read[name], strict=True)) for name in names}

    sums, deltas, gated = lines("written", "sum rule"), lines("written", "sum rule", "delta rule"), "gated delta rule"
    left: dict[str, Curve] = {name: list(enumerate(shares)) for name, shares in shares_left().items()}
    since = {"xlabel": "steps since the value was written", "ylabel": "share that is still read"}
    answers = {_label(name): list(zip(PAIRS, shares, strict=True)) for name, shares in right_answers().items()}
    counts = {"xlabel": "pairs written", "ylabel": "share of right answers"}
    closed = f"In step {NEW_TEXT} a new text begins, and the gate of the gated delta rule closes for this step."
    none = f"Random keys of {SMALL_KEY_DIM} numbers, each written once, by the sum rule; nothing is trained."
    emptied = "A gate empties the state at once, the delta rule does not"
    return [
        _draw(
            folder / "teach-sum.png", "The sum rule adds: a new value does not replace the old one", sums, asked, axis
        ),
        _draw(folder / "teach-delta.png", "The delta rule replaces: a key reads its latest value", deltas, asked, axis),
        _draw(folder / "teach-retention.png", "Each head of RetNet forgets at a pace of its own", left, "", since),
        _draw(folder / "teach-gated-delta.png", emptied, lines("delta rule", gated), closed, axis),
        _draw(folder / "teach-capacity.png", "More features hold more pairs", answers, none, counts),
    ]


def _draw(path: Path, message: str, curves: Mapping[str, Curve], note: str, axis: Mapping[str, str]) -> Path:
    figure, axes = new_figure(figsize=(6.4, 3))
    axes.set(**axis)
    say(figure, message, *filter(None, [note]))
    draw_curves(axes, curves)
    save_figure(figure, path)
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the figures")
    for path in draw(parser.parse_args(arguments).folder):
        print(f"figure: {path}")


if __name__ == "__main__":
    main()
