"""Figures, drawn from records and from nothing else."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Okabe and Ito's, which people who confuse red and green can tell apart.
COLOURS = {"sum": "#0072B2", "gated": "#009E73", "decay": "#E69F00", "delta": "#D55E00"}
COLOURS |= {"transformer": "black", "softmax": "black"}
STYLES = {"native": "-", "chunkwise": "--", "SDPA": "-", "causal_product": ":"}


def draw_next_token(record: dict[str, Any], path: Path) -> None:
    """Time and peak memory of the next token against the number of tokens before it (Mao 2022, Fig. 1)."""
    with _figure(path, 2, (10, 4.2)) as (time, memory):
        for model in record["parameters"]:
            rows = [row for row in record["rows"] if row["model"] == model]
            lengths = [row["length"] for row in rows]
            _line(time, rows, lengths, COLOURS[model], "-", model)
            memory.plot(lengths, [row["peak bytes"] / 2**20 for row in rows], "o-", markersize=4, color=COLOURS[model])
        time.figure.suptitle("With a fast weight memory the next token costs the same, however many came before it")
        time.set(xlabel="tokens before it", ylabel="milliseconds", title="time of the next token")
        time.set_ylim(bottom=0)
        memory.set(xlabel="tokens before it", ylabel="MiB", title="peak memory beside the weights", yscale="log")
        memory.set_ylim(3, 2000)
        fast = f"fast weight memory ({', '.join(model for model in record['parameters'] if model != 'transformer')})"
        for axes, attention, memories in ((time, (0.6, 0.8), (0.67, 0.08)), (memory, (0.62, 0.88), (0.65, 0.15))):
            axes.text(*attention, "attention (fairseq's Transformer)", ha="right", transform=axes.transAxes)
            axes.text(*memories, fast, ha="center", color=COLOURS["sum"], transform=axes.transAxes)


def draw_training_length(record: dict[str, Any], path: Path) -> None:
    """Time of forward and backward against T, with the tokens of a call constant."""
    rows = sorted((row for row in record["rows"] if row["status"] == "measured"), key=lambda row: row["sizes"]["time"])
    with _figure(path, 1, (9, 6)) as [axes]:
        for implementation, rule in dict.fromkeys((row["implementation"], row["rule"]) for row in rows):
            own = [row for row in rows if (row["implementation"], row["rule"]) == (implementation, rule)]
            style = STYLES.get(implementation, ":" if "recurrent" in implementation else "-.")
            name = f"{implementation}, {rule}" + (" attention" if rule == "softmax" else "")
            _line(axes, own, [row["sizes"]["time"] for row in own], COLOURS[rule], style, name)
        title = f"forward and backward of {record['settings']['tokens']:,} tokens"
        axes.set(xlabel="T", ylabel="milliseconds", yscale="log", title=title)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.legend(fontsize="small", ncols=2)


@contextmanager
def _figure(path: Path, columns: int, size: tuple[float, float]) -> Iterator[Any]:
    """Axes to draw on; the figure is saved then."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=size, layout="constrained", squeeze=False)
    yield axes[0]
    for each in axes[0]:
        each.grid(alpha=0.3)
    # Without the version of matplotlib in it, the same record gives the same file.
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=120, metadata={"Software": None})
    pyplot.close(figure)


def _line(axes: Any, rows: list[Any], x: list[int], colour: str, style: str, name: str) -> None:
    """Medians in milliseconds as a line, quartiles as a band."""
    median, lower, upper = ([row["seconds"][what] * 1e3 for row in rows] for what in ("median", "lower", "upper"))
    axes.plot(x, median, style, marker="o", markersize=4, color=colour, label=name)
    axes.fill_between(x, lower, upper, color=colour, alpha=0.15, linewidth=0)
