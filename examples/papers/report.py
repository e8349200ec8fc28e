"""Tables and verdicts of a ledger, and those of the pages in docs/."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, log, sqrt
from pathlib import Path
from statistics import mean, stdev

from common.commands import ROOT
from common.files import UserError
from common.tables import format_table

from papers.grid import plan
from papers.language_models import STATE
from papers.ledger import Entry
from papers.rows import Claim, Places, Table
from papers.scaled import SCALED

DOCS = ROOT / "docs"
_WITHOUT = " (without kernels)"
_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t for 95%, by the number of seeds; of more than ten it would be a little smaller."""


@dataclass(frozen=True)
class Interval:
    """A mean over seeds, with the half width of its 95% interval, which is infinite for one seed."""

    mean: float
    half: float

    def __sub__(self, other: Interval) -> Interval:
        # The errors of independent means add in squares.
        return Interval(self.mean - other.mean, sqrt(self.half**2 + other.half**2))

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.half == inf else f"{self.mean:.2f} ± {self.half:.2f}"


def interval(values: Sequence[float]) -> Interval:
    """The mean's interval, by Student's t. `values`: of each seed."""
    if len(values) < 2:
        return Interval(values[0], inf)
    return Interval(mean(values), _T[min(len(values), max(_T))] * stdev(values) / sqrt(len(values)))


def current(entries: Iterable[Entry]) -> list[Entry]:
    """The entries whose commands are still the row's."""
    return [entry for entry in entries if not is_stale(entry)]


def is_stale(entry: Entry, tables: Mapping[str, Table] = SCALED) -> bool:
    """True if the row is gone, or its commands have changed since; the flag for a CPU does not count."""
    table = tables.get(entry.table)
    if table is None or entry.row not in table.rows:
        return True
    places = Places(Path("DATA"), Path("OUT"), Path("SOURCE"))
    runs = plan(entry.table, table, [entry.row], [entry.seed], places, checked=False)
    return all(_anywhere(run.commands) != _anywhere(entry.commands) for run in runs)


def _anywhere(commands: Sequence[str]) -> list[str]:
    return [re.sub(r" --cpu\b", "", command) for command in commands]


def block(name: str, table: Table, entries: Iterable[Entry], pictures: bool = False) -> str:
    """A table of a ledger's results: a row for each of its rows, the verdicts on its claims, and links to `pictures`.

    Raises UserError if its runs are of different data.
    """
    found = [entry for entry in entries if entry.table == name]
    if not found:
        return "Nothing was run yet.\n"
    if len({entry.data for entry in found}) > 1 or len({entry.inputs for entry in found if entry.inputs}) > 1:
        raise UserError(
            f"{name}: its runs are of different data, which no table may mix; give each a ledger of its own"
        )
    # The size of the state comes after the perplexities.
    measures = sorted(dict.fromkeys(name for entry in found for name in entry.scores), key=lambda name: name == STATE)
    above = [f"loss above {table.rows[table.baseline[0]].model}, %"] if table.baseline else []
    header = ["model", "seeds", "parameters", "hours", "valid perplexity", *measures, *above, *table.measures]
    rows = []
    for key, row in table.rows.items():
        of_row = [entry for entry in found if entry.row == key]
        if not of_row:
            rows.append([row.model, "0", *[""] * (3 + len(measures) + len(above)), *row.numbers])
            continue
        scores = [_cell([entry.scores[name] for entry in of_row if name in entry.scores], name) for name in measures]
        perplexity = _cell([min(value for _, value in entry.valid) for entry in of_row if entry.valid])
        hours = mean(entry.seconds for entry in of_row) / 3600
        numbers = [str(len(of_row)), f"{of_row[0].parameters:,}", f"{hours:.2f}", perplexity]
        mark = _WITHOUT if any(entry.without_kernels for entry in of_row) else ""
        compared = [_above(of_row, found, *table.baseline)] if table.baseline else []
        rows.append([f"{row.model}{mark}", *numbers, *scores, *compared, *row.numbers])
    verdicts = [[claim.text, *verdict(claim, found)] for claim in table.claims]
    claims = [format_table(["claim", "measured", "verdict"], verdicts)] if verdicts else []
    drawn = [f"![Validation perplexity by update]({name}-curves.png)"] if has_curves(found) else []
    if any(claim.minus and difference(claim, found) for claim in table.claims):
        drawn.append(f"![Differences of the claims, with intervals]({name}-claims.png)")
    if STATE in measures:
        drawn.append(f"![Test perplexity against the size of the state]({name}-states.png)")
    parts = [format_table(header, rows), *claims, _made_by(found), *(drawn if pictures else [])]
    return "\n\n".join(parts) + "\n"


def has_curves(entries: Iterable[Entry]) -> bool:
    """True if there is one that was validated more than once."""
    return any(len(entry.valid) > 1 for entry in entries)


def _cell(values: Sequence[float], measure: str = "") -> str:
    if measure == STATE:  # which has no chance in it
        return f"{values[0]:,.0f}" if values else ""
    if values and max(values) > 2 * min(values):  # a mean of runs that broke down says nothing
        return f"{min(values):,.0f} – {max(values):,.0f}"
    return str(interval(values)) if values else ""


def _above(of_row: Sequence[Entry], entries: Sequence[Entry], baseline: str, measure: str) -> str:
    """By how many percent the loss of a row is above that of another."""
    # A loss is the logarithm of a perplexity.
    of_other = [log(entry.scores[measure]) for entry in entries if entry.row == baseline]
    if not of_other:
        return ""
    return str(interval([100 * (log(entry.scores[measure]) / mean(of_other) - 1) for entry in of_row]))


def difference(claim: Claim, entries: Sequence[Entry]) -> Interval | None:
    """The quantity of a claim: a score, less another; None if one was not run."""
    sides = []
    for side in (claim.of, claim.minus):
        if side is None:
            sides.append(Interval(0.0, 0.0))
            continue
        row, measure = side
        values = [entry.scores[measure] for entry in entries if entry.row == row]
        if not values:
            return None
        sides.append(interval(values))
    return sides[0] - sides[1]


def verdict(claim: Claim, entries: Sequence[Entry]) -> tuple[str, str]:
    """The measured quantity of a claim, and its verdict: "yes" and "no" if the whole interval says so."""
    found = difference(claim, entries)
    if found is None:
        return "", "not run"
    low, high = found.mean - found.half, found.mean + found.half
    least = -inf if claim.at_least is None else claim.at_least
    most = inf if claim.at_most is None else claim.at_most
    if found.half == inf:
        return str(found), f"open: one seed{'' if least <= found.mean <= most else ', and against it'}"
    # The interval lies within the claim's bounds, outside of them, or across one.
    if least <= low and high <= most:
        return str(found), "yes"
    return str(found), "no" if high < least or low > most else "open: the interval holds both"


def _made_by(entries: Sequence[Entry]) -> str:
    """The code, the machines and the versions of these runs."""
    versions: dict[str, set[str]] = {}
    for entry in entries:
        for name, version in entry.versions.items():
            versions.setdefault(name, set()).add(version)
    seen = {
        "commits": sorted({entry.commit for entry in entries}),
        "processors": sorted({entry.processor for entry in entries}),
        "GPUs": sorted({f"{entry.gpus} x {entry.gpu}" for entry in entries if entry.gpus}),
        "precision": sorted({entry.precision for entry in entries if entry.gpus}),
        "versions": [f"{name} {', '.join(sorted(found))}" for name, found in versions.items()],
    }
    missing = sorted({backend for entry in entries for backend in entry.without_kernels})
    if missing:
        seen[f"trained{_WITHOUT}"] = missing
    return " ".join(f"{name[0].upper()}{name[1:]}: {'; '.join(values)}." for name, values in seen.items() if values)


def page(name: str, text: str, entries: Iterable[Entry]) -> str:
    """The page of this name in `DOCS` with its blocks made anew. Raises UserError if a table that was run has no block,
    or a block has no run.
    """
    entries = current(entries)
    tables = {name_of: table for name_of, table in SCALED.items() if table.page == name}
    for name_of, table in tables.items():
        begin, end = f"<!-- {name_of}: made by examples/reproduce.py report -->", f"<!-- /{name_of} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        made = f"{begin}\n\n{block(name_of, table, entries, pictures=True)}\n{end}"
        text, count = pattern.subn(lambda _, made=made: made, text)
        wanted = int(any(entry.table == name_of for entry in entries))
        if count != wanted:
            raise UserError(f"{DOCS / name} has {count} blocks between {begin} and {end}; it must have {wanted}")
    return text
