"""The results of kernels.py as tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.cases import RULES
from harness.peers import causal_product, flash_linear_attention, softmax
from harness.tables import markdown, ratio, significant

Record = dict[str, Any]
Row = dict[str, Any]

PEERS = ("chunkwise", "reference", causal_product.NAME, softmax.NAME, flash_linear_attention.NAME)


def render(record: Record) -> str:
    """A table for each dtype and pass; after them the machine's rates, who took no part, and what was cut."""
    keys = list(dict.fromkeys((row["dtype"], row["pass"]) for row in record["rows"]))
    parts = []
    for dtype, kind in keys:
        rows = [row for row in record["rows"] if (row["dtype"], row["pass"]) == (dtype, kind)]
        parts.append(f"**{kind}, {dtype}**\n\n{_table(rows)}")
    parts += [describe_rates(record["rates"]), describe_absent(record["rows"])]
    if record["cut"]:
        parts.append("Cut to keep to the budget:\n\n" + "".join(f"- {line}\n" for line in record["cut"]))
    return "\n".join(part for part in parts if part)


def describe_rates(rates: dict[str, Any]) -> str:
    """The machine's limits in a sentence."""
    copies = ", ".join(
        f"{significant(rate / 1e9)} GB/s for {int(size) >> 20:,} MiB" for size, rate in rates["copy"].items()
    )
    products = ", ".join(f"{significant(rate / 1e9)} GFLOP/s in {dtype}" for dtype, rate in rates["matmul"].items())
    return (
        f"The machine, measured in the same run: a copy moves {copies} (read and written); a matrix product does "
        f"{products}.\n"
    )


def _table(rows: Sequence[Row]) -> str:
    cells = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        here = [row for row in rows if row["shape"] == shape]
        for rule in RULES:
            cells += _line(shape, rule, here)
    # A peer that nowhere took part has no column.
    present = [i for i, name in enumerate(PEERS) if any(line[6 + i] for line in cells)]
    header = ["shape", "B x H, T, K, V", "rule", "backend", "median (quartiles), ms", "of the limit"]
    header += [PEERS[i] for i in present]
    return markdown(header, [[*line[:6], *(line[6 + i] or "–" for i in present)] for line in cells], left=4)


def _line(shape: str, rule: str, rows: Sequence[Row]) -> list[list[str]]:
    """A rule at a shape: the native kernels where they ran, chunkwise elsewhere, and the others' time over it."""
    done = {row["implementation"]: row for row in rows if row["status"] == "measured" and row["rule"] == rule}
    done |= {row["implementation"]: row for row in rows if row["status"] == "measured" and row["rule"] == "softmax"}
    own = next((done[name] for name in ("native", "chunkwise") if name in done), None)
    if own is None:
        return []
    seconds, sizes = own["seconds"], own["sizes"]
    peers = []
    for name in PEERS:
        times = {
            other: row["seconds"]["median"] / seconds["median"]
            for other, row in done.items()
            if (other == name or other.startswith(f"{name} ")) and row is not own
        }
        best = min(times, key=lambda other: times[other], default=None)
        function = "" if best is None or best == name else f" ({best.removeprefix(name).strip()})"
        peers.append("" if best is None else ratio(times[best]) + function)
    quartiles = f"({significant(seconds['lower'] * 1e3)} – {significant(seconds['upper'] * 1e3)})"
    return [
        [
            shape,
            f"{sizes['batch']} x {sizes['heads']}, {sizes['time']:,}, {sizes['key_dim']}, {sizes['value_dim']}",
            rule,
            own["implementation"],
            f"{significant(seconds['median'] * 1e3)} {quartiles}",
            f"{own['limit']['seconds'] / seconds['median'] * 100:.0f}% of {own['limit']['binding']}",
            *peers,
        ]
    ]


def describe_absent(rows: Sequence[Row]) -> str:
    """Who took no part, why, and where, one line for each reason."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row["status"] == "measured":
            continue
        key = row["implementation"], row["status"], row["message"]
        places.setdefault(key, []).append(f"{row['rule']}, {row['shape']}, {row['dtype']}, {row['pass']}")
    if not places:
        return ""
    every = len({(row["shape"], row["dtype"], row["pass"]) for row in rows})
    lines = []
    for (implementation, status, message), where in places.items():
        at = where[0] if len(where) == 1 else f"{len(where)} cases of {every} comparisons, such as {where[0]}"
        lines.append(f"- {implementation}, {status} ({at}): {message}\n")
    return "Who took no part:\n\n" + "".join(lines)
