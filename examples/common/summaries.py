"""What the programs that summarise trainings share: a training's log, read for a person who asks how far it came, and
curves of several of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.curves import save_figure
from common.fairseq_logs import Training, parse_training


@dataclass
class Run:
    """What one model left behind.

    Attributes:
        name: of its folder.
        training: what the training's log says.
        problems: what is wrong with the files, for a person to read.
    """

    name: str
    training: Training = field(default_factory=Training)
    problems: list[str] = field(default_factory=list)

    def read_training(self, log: Path) -> str:
        """Reads the log of its training, which must exist; returns its text."""
        text = log.read_text(encoding="utf-8", errors="replace")
        self.training = training = parse_training(text)
        self.problems += [f"{log} has a damaged line: {line[:100]}" for line in training.damaged]
        if training.parameters is None:
            self.problems.append(f"{log} ends before the model was built")
        elif not training.finished:
            valid = training.valid
            reached = f"last validation at update {max(valid)}" if valid else "no validation yet"
            self.problems.append(f"{log} is of an unfinished training: it ends at update {training.updates}, {reached}")
        return text


def _style(number: int) -> dict[str, str]:
    """Of a run's curve: there are ten colours, and broken lines for more runs than that."""
    return {"color": f"C{number}", "linestyle": "-" if number < 10 else "--"}


def draw_curves(runs: Sequence[Run], path: Path, perplexity: str) -> None:
    """Draws perplexity over updates, training on the left and validation on the right, and saves a PNG.

    Args:
        runs: in the order of the legend.
        path: of the file.
        perplexity: what the axis is called.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axis, kind in zip(axes, ("train", "valid"), strict=True):
        for number, run in enumerate(runs):
            curve = sorted(getattr(run.training, kind).items())
            if curve:
                updates, perplexities = zip(*curve, strict=True)
                marker = "o" if kind == "valid" or len(curve) == 1 else None
                style = _style(number)
                axis.plot(updates, perplexities, **style, marker=marker, markersize=3, linewidth=1.4)
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(ScalarFormatter())
        axis.set_xlim(left=0)
        axis.set_xlabel("updates")
        axis.set_ylabel(f"{perplexity} (log scale)")
        axis.set_title("training" if kind == "train" else "validation", loc="left")
        axis.grid(color="0.9", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    names = [
        plt.Line2D([], [], **_style(number), linewidth=2, label=run.name)
        for number, run in enumerate(runs)
        if run.training.train or run.training.valid
    ]
    figure.legend(handles=names, loc="outside lower center", ncols=min(len(names) or 1, 6), frameon=False)
    save_figure(figure, path)
