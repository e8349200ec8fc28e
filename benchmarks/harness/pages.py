"""The record of a program as Markdown: tables, absent implementations and cut rounds."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from common.tables import format_table

from harness.cases import RULES
from harness.implementations import CAUSAL_PRODUCT, FLASH_LINEAR_ATTENTION, SOFTMAX
from harness.trainings import PLAIN

Record = dict[str, Any]
Row = dict[str, Any]
Columns = dict[str, str | Callable[[Row], str]]
"""By a column's title its cells: a format of the row's facts, or a function of the row."""

PEERS = ("chunkwise", "reference", CAUSAL_PRODUCT, SOFTMAX, FLASH_LINEAR_ATTENTION)


def render(record: Record) -> str:
    """A record as Markdown, as the page shows it."""
    return "\n".join(part for part in _PARTS[record["program"]](record) if part)


def table(columns: Columns, rows: Sequence[Any], left: int = 1) -> str:
    """A line for each row. The first `left` columns are text."""
    cells = [[cell.format(**row) if isinstance(cell, str) else cell(row) for cell in columns.values()] for row in rows]
    return markdown(list(columns), cells, left)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table whose first `left` columns are text and whose others are numbers, with its columns aligned."""
    head, *body = ([cell.replace("|", "\\|") for cell in row] for row in (header, *rows))
    return format_table(head, body, left) + "\n"


def significant(value: float) -> str:
    """Three significant digits, without an exponent between a thousandth and a million."""
    magnitude = abs(value)
    return f"{value:{',.0f' if magnitude >= 100 else '.1f' if magnitude >= 10 else '.2f' if magnitude >= 1 else '.3g'}}"


def spread(measured: dict[str, float], scale: float) -> str:
    """Median and quartiles, multiplied by `scale`."""
    middle, lower, upper = (significant(measured[name] * scale) for name in ("median", "lower", "upper"))
    return f"{middle} ({lower} – {upper})"


def _in_unit(unit: str, size: float, value: float) -> str:
    return f"{significant(value / size)} {unit}"


milliseconds, gigabytes = partial(_in_unit, "ms", 1e-3), partial(_in_unit, "GB", 1e9)
mebibytes, ratio = partial(_in_unit, "MiB", 2**20), partial(_in_unit, "x", 1)


def speed(value: float) -> str:
    return f"{value:,.0f} tokens/s"


def share(value: float) -> str:
    return f"{value * 100:.0f}%"


def count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" + "s" * (number != 1)


def median(row: Row, fact: str = "seconds") -> float:
    return row[fact]["median"]


def brief(error: BaseException) -> str:
    """An error as the message of a row, of 200 characters at most."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 200 else f"{text[:197]}..."


def _unique(items: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(items))


def _kernels(record: Record) -> Iterator[str]:
    """A table for each dtype and pass, the machine's rates, absent implementations and cut rounds."""
    for dtype, kind in _unique((row["dtype"], row["pass"]) for row in record["rows"]):
        rows = [row for row in record["rows"] if (row["dtype"], row["pass"]) == (dtype, kind)]
        yield f"**{kind}, {dtype}**\n\n{_rules(rows)}"
    rates = record["rates"]
    copies = (f"{significant(rate / 1e9)} GB/s for {int(size) >> 20:,} MiB" for size, rate in rates["copy"].items())
    products = (f"{significant(rate / 1e9)} GFLOP/s in {dtype}" for dtype, rate in rates["matmul"].items())
    text = "The machine, measured in the same run: a copy moves {} (read and written); a matrix product does {}.\n"
    yield text.format(", ".join(copies), ", ".join(products))
    yield _absent(record["rows"])
    if record["cut"]:
        yield "Cut to keep to the budget:\n\n" + "".join(f"- {line}\n" for line in record["cut"])


def _rules(rows: Sequence[Row]) -> str:
    """Rules by shape: times of the native kernels, or of chunkwise without them, and times of others over these."""
    header = ["shape", "B x H, T, K, V", "rule", "backend", "median (quartiles), ms", "of the limit", *PEERS]
    lines = []
    for shape, rule in itertools.product(_unique(row["shape"] for row in rows), RULES):
        here = [row for row in rows if row["shape"] == shape and row["rule"] in (rule, "softmax")]
        done = {row["implementation"]: row for row in here if row["status"] == "measured"}
        own = done.get("native", done.get("chunkwise"))
        if own is None:
            continue
        sizes = "{batch} x {heads}, {time:,}, {key_dim}, {value_dim}".format(**own["sizes"])
        limit = f"{own['limit']['seconds'] / median(own) * 100:.0f}% of {own['limit']['binding']}"
        others = []
        for name in PEERS:
            # A peer may have several functions for a rule; the fastest counts.
            functions = [row for row in done.values() if row is not own and row["implementation"].split()[0] == name]
            best = min(functions, key=median, default=None)
            function = "" if best is None else best["implementation"].removeprefix(name)
            times = "–" if best is None else ratio(median(best) / median(own))
            others.append(times + (f" ({function.strip()})" if function else ""))
        lines.append([shape, sizes, rule, own["implementation"], spread(own["seconds"], 1e3), limit, *others])
    # A peer that measured nothing has no column.
    kept = [i for i in range(len(header)) if header[i] not in PEERS or any(line[i] != "–" for line in lines)]
    return markdown([header[i] for i in kept], [[line[i] for i in kept] for line in lines], left=4)


def _absent(rows: Sequence[Row]) -> str:
    """A line for each reason why an implementation was not measured, with the number of its cases."""
    places: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["status"] != "measured":
            where = places.setdefault((f"{row['implementation']}, {row['status']}", row["message"]), [])
            where.append(f"{row['rule']}, {row['shape']}, {row['dtype']}, {row['pass']}")
    every = len({(row["shape"], row["dtype"], row["pass"]) for row in rows})
    lines = []
    for (who, message), where in places.items():
        at = where[0] if len(where) == 1 else f"{len(where)} cases of {every} comparisons, such as {where[0]}"
        lines.append(f"- {who} ({at}): {message}\n")
    return "Who took no part:\n\n" + "".join(lines) if lines else ""


def _generation(record: Record) -> Iterator[str]:
    """Time and memory of a decode step by model and length, and the Transformer's time over it."""
    base = {row["length"]: row for row in record["rows"] if row["model"] == "transformer"}

    def beside(row: Row) -> str:
        fact = "seconds beside other lengths"
        return significant(median(row, fact) * 1e3) if fact in row else "–"

    columns: Columns = {
        "model": "{model}",
        "tokens before (first – last timed)": "{length:,} ({first:,} – {last:,})",
        "median (quartiles), ms": lambda row: spread(row["seconds"], 1e3),
        "Transformer over it": lambda row: ratio(median(base[row["length"]]) / median(row)),
        "median beside other lengths, ms": beside,
        "state": lambda row: mebibytes(row["state bytes"]),
        "peak": lambda row: mebibytes(row["peak bytes"]),
    }
    yield f"{count(record['settings']['batch'], 'text')} at a time.\n"
    yield table(columns, sorted(record["rows"], key=lambda row: list(record["parameters"]).index(row["model"])))
    yield _cut(record)


def _translation(record: Record) -> Iterator[str]:
    """A table for each beam, one of whole translations, and cut rounds."""
    rows, settings = record["rows"], record["settings"]
    models = _unique(row["model"] for row in rows)
    # Lengths with the common source come first, then those with a source of their own.
    rows = sorted(rows, key=lambda row: (models.index(row["model"]), row["source"] != settings["source"]))
    base = {(row["beam"], row["source"], row["length"]): median(row) for row in rows if row["model"] == "transformer"}
    columns: Columns = {
        "model": "{model}",
        "source": "{source:,}",
        "tokens before": "{length:,}",
        "median (quartiles), ms": lambda row: spread(row["seconds"], 1e3),
        "Transformer over it": lambda row: ratio(base[row["beam"], row["source"], row["length"]] / median(row)),
        "state of a hypothesis": lambda row: mebibytes(row["state bytes"] / settings["hypotheses"]),
        "its encoder output": lambda row: mebibytes(row["encoder bytes"] / settings["hypotheses"]),
        "peak of all": lambda row: mebibytes(row["peak bytes"]),
    }
    for beam in sorted({row["beam"] for row in rows}, reverse=True):
        yield f"**Beam {beam}**\n\n{table(columns, [row for row in rows if row['beam'] == beam])}"
    whole = record["whole"]
    [alone] = [median(row) for row in whole if row["model"] == "transformer"]
    beam, source, length = (whole[0][name] for name in ("beam", "source", "length"))
    columns = {
        "model": "{model}",
        "median (quartiles), s": lambda row: spread(row["seconds"], 1),
        "ms for a token": lambda row: significant(median(row) / row["length"] * 1e3),
        "Transformer over it": lambda row: ratio(alone / median(row)),
    }
    yield (
        f"**Whole translations, beam {beam}**: {count(settings['hypotheses'] // beam, 'sentence')} of "
        f"{count(source, 'token')}, {count(length, 'token')} each\n\n{table(columns, whole)}"
    )
    yield _cut(record)


def _training_length(record: Record) -> Iterator[str]:
    """Medians by implementation and length, absent implementations and cut rounds."""
    times = {
        (f"{row['implementation']}, {row['rule']}", row["sizes"]["time"]): significant(median(row) * 1e3)
        for row in record["rows"]
        if row["status"] == "measured"
    }
    lengths = sorted({length for _, length in times})
    lines = [[who, *(times.get((who, length), "–") for length in lengths)] for who in _unique(who for who, _ in times)]
    yield markdown(["ms at T =", *(f"{length:,}" for length in lengths)], lines)
    yield _absent(record["rows"])
    yield _cut(record)


def _training(record: Record) -> Iterator[str]:
    """A table for each part: speed, also over that of plain PyTorch, memory, operators and waits of an update."""
    for part, settings in record["parts"].items():
        rows = [row for row in record["rows"] if row["part"] == part]
        done = [row for row in rows if row["status"] == "measured"]
        plain = [median(row) for row in done if row["implementation"] == PLAIN]
        columns: Columns = {
            "model": "{model}",
            "trained by": "{implementation}",
            "tokens/s (quartiles)": lambda row: spread(row["tokens per second"], 1),
            "over plain PyTorch": lambda row, plain=plain: ratio(plain[0] / median(row)) if plain else "–",
            "peak memory": lambda row: gigabytes(row["peak bytes"]),
            "GPU busy": lambda row: "–" if row["busy"] is None else share(row["busy"]),
            "operators": "{operators:,}",
            "on the GPU": lambda row: "–" if row["kernels"] is None else f"{row['kernels']:,}",
            "waits": lambda row: "–" if row["waits"] is None else str(len(row["waits"])),
        }
        sizes = (
            f"batches of {settings['batch']} x {settings['length']:,} tokens, {settings['types']:,} vocabulary entries"
        )
        yield f"**{part}**: {sizes}, {record['precision']}, `{settings['flags']}`\n"
        yield table(columns, done, left=2) if done else ""
        others = [row for row in rows if row not in done]
        yield "".join(
            f"- {row['model']}, {row['implementation']}, {row['status']}: {row['message']}\n" for row in others
        )
    yield _cut(record)


# The ways of benchmarks/updates.py, as a table calls them.
_LAYERS = {"plain": "", "compile": "compiled", "compile and replay": "compiled, CUDA graphs"}
_LAYERS |= {"cuda-graphs": "CUDA graphs"}


def _updates(record: Record) -> Iterator[str]:
    """Operators by model, precision and part of an update, and waits."""
    columns: Columns = {
        "model": "{model}",
        "precision": "{precision}",
        "layers": lambda row: _LAYERS[row["way"]],
        "operators": "{operators:,}",
        "compiled": "{compiled:,}",
        "forward": "{parts[forward]:,}",
        "backward": "{parts[backward]:,}",
        "all else": lambda row: f"{row['operators'] - row['parts']['forward'] - row['parts']['backward']:,}",
        "waits": lambda row: str(len(row["waits"])),
    }
    yield table(columns, record["rows"])


def _in_turns(record: Record) -> Iterator[str]:
    """A table for each part, with the time of each implementation over that of the first."""
    columns: Columns = {
        "pass": "{pass}",
        "T": "{time:,}",
        "implementation": "{name}",
        "median (quartiles), ms": lambda row: spread(row["seconds"], 1e3),
        "times as long as the first": lambda row: ratio(row["ratio"]),
    }
    for part in _unique(row["part"] for row in record["rows"]):
        yield f"**{part}**\n\n{table(columns, [row for row in record['rows'] if row['part'] == part])}"


def _cut(record: Record) -> str:
    return "".join(f"- cut to keep to the budget: {line}\n" for line in record["cut"])


_PARTS: dict[str, Callable[[Record], Iterator[str]]] = {
    **{"kernels": _kernels, "generation": _generation, "translation": _translation, "training": _training},
    **{"updates": _updates, "training_length": _training_length},
    **dict.fromkeys(("mixers", "gated_delta", "models", "converted"), _in_turns),
}
