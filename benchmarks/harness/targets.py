"""The project's targets beside its results: met, missed and by how much, or unmeasured and why.

benchmarks/targets.json lists them by program and device:

    where, unmeasured: the device for readers; the same, and the reason, if there are no results.
    each: defaults of the targets.
    cases: the values of each column of the rows that are compared, to which a target adds; "*" for all of a run but
        softmax attention, "of one length" for the source in the run's settings.
    quantity: the target for readers; {fewest} and {most} stand for the lengths that were measured.
    "at least" or "at most": the limit for the worst case; `label` names a case.
    slow, fast: changes of a case that find two rows; the quantity is the former's time over the latter's. Of several
        values the fastest row that was measured counts.
    number: otherwise, a number (`_NUMBERS`) of the row that `fast` finds, by default that of the native kernels.
    show: the format of a number, a function of `pages`.
"""

import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from harness import ROOT, pages
from harness.implementations import BACKENDS
from harness.pages import Record, Row, count, markdown, median, significant


class Failure(str):
    """The error of a case: it makes a target missed, whatever the others reach."""


# A number for a target, or the reason why there is none; None for a case that the target leaves out.
Number = float | str | None

GOALS = json.loads((ROOT / "benchmarks" / "targets.json").read_text())


class Verdict(NamedTuple):
    """A row of the table, in words. `verdict` begins with "met", "missed" or "unmeasured"."""

    where: str
    quantity: str
    target: str
    measured: str
    verdict: str


def judge(sense: str, limit: float, show: Callable[[float], str], numbers: Sequence[tuple[str, Any]]) -> list[str]:
    """Compares the worst of the numbers with the limit; returns it, and the verdict.

    Cases without a number are named. A target is unmeasured if all cases are, and missed if one failed.
    """
    # A case has a number, the reason why it has none, or an error (`Failure`), which is a text, too.
    known = [(value, label) for label, value in numbers if not isinstance(value, str)]
    failed = [(label, value) for label, value in numbers if isinstance(value, Failure)]
    missing = [(label, value) for label, value in numbers if type(value) is str]
    if not known and not failed:
        return ["–", f"unmeasured: {_reasons(missing) or 'there are no results'}"]
    least = sense == "at least"
    reached = [value >= limit if least else value <= limit for value, _ in known]
    measured, state, comments = "–", "missed" if failed or not all(reached) else "met", []
    if known:
        worst, label = min(known) if least else max(known)
        measured = f"{show(worst)} ({label})"
        if len(known) > 1:
            measured += f"; median of {len(known)}: {show(statistics.median(value for value, _ in known))}"
        if not all(reached):
            comments.append(f"by a factor of {significant(limit / worst if least else worst / limit)}")
            comments += [f"reached by {sum(reached)} of {len(known)}"] if len(known) > 1 else []
    for state_of, cases in (("failed", failed), ("unmeasured", missing)):
        if cases:
            others = f" and {len(cases) - 3} more" if len(cases) > 3 else ""
            comments.append(f"{state_of}: {', '.join(label for label, _ in cases[:3])}{others} ({_reasons(cases)})")
    return [measured, ": ".join([state, *(["; ".join(comments)] if comments else [])])]


def _reasons(cases: Sequence[tuple[str, str]]) -> str:
    return "; ".join(dict.fromkeys(reason for _, reason in cases))


def evaluate(records: Sequence[Record]) -> list[Verdict]:
    """All targets in order. Without a record a target is unmeasured."""
    known = {(record["program"], record["device"]): record for record in records}
    verdicts = []
    for goals in GOALS:
        record = known.get((goals["program"], goals["device"]))
        where, absent = goals["unmeasured"]
        span: dict[str, Any] = {"fewest": "the fewest", "most": "the most"}
        if record is not None:
            where = goals["where"].format(threads=count(record["threads"], "thread"), **record.get("settings", {}))
            span |= {name: f"{length:,}" for name, length in _span(record).items()}
        for target in (goals.get("each", {}) | own for own in goals["targets"]):
            [sense] = {"at least", "at most"} & set(target)
            show = getattr(pages, target.get("show", "ratio"))
            cases = goals["cases"] | target.get("cases", {})
            found = judge(sense, target[sense], show, _compare(target, cases, record) if record else [("", absent)])
            verdicts.append(Verdict(where, target["quantity"].format(**span), f"{sense} {show(target[sense])}", *found))
    return verdicts


def render(verdicts: Sequence[Verdict]) -> str:
    """The table in Markdown."""
    return markdown(Verdict._fields, verdicts, left=len(Verdict._fields))


def _span(record: Record) -> dict[str, int]:
    lengths = [row["length"] for row in record["rows"] if "length" in row]
    return {"fewest": min(lengths), "most": max(lengths)} if lengths else {}


def _compare(target: dict[str, Any], choices: dict[str, Any], record: Record) -> list[tuple[str, Number]]:
    """For each case a number, or why there is none."""
    rows, span = record["rows"], _span(record)

    def find(case: Row, changes: Row) -> Row | str:
        wanted = {
            name: value if isinstance(value, list) else [span.get(value, value)]
            for name, value in (case | changes).items()
        }
        found = [row for row in rows if all(row.get(name) in values for name, values in wanted.items())]
        measured = [row for row in found if _why_not(row) is None]
        return min(measured, key=median) if measured else next(map(_why_not, found), None) or "not in the run, or cut"

    def number(case: Row) -> Number:
        fast = find(case, target.get("fast", {"implementation": "native"}))
        slow = find(case, target["slow"]) if "slow" in target else fast
        if isinstance(fast, str) or isinstance(slow, str):
            return fast if isinstance(fast, str) else slow
        if "number" in target:
            return _NUMBERS[target["number"]](rows, fast)
        return median(slow) / median(fast)

    def values(key: str) -> list[Any]:
        if choices[key] == "*":
            every = dict.fromkeys(row[key] for row in rows)
            return [value for value in every if value not in ("transformer", "softmax")]
        chosen = (record["settings"]["source"] if value == "of one length" else value for value in choices[key])
        return [value for value in chosen if value != target.get("but")]

    # All combinations of the columns' values; a case without a quantity (None) does not count.
    cases = [dict(zip(choices, case, strict=True)) for case in itertools.product(*map(values, choices))]
    numbers = [(target["label"].format(**case), number(case)) for case in cases]
    return [(label, value) for label, value in numbers if value is not None]


def _why_not(row: Row) -> str | None:
    """Why a row has no time, if it has none."""
    status, reason = row.get("status", "measured"), f"{row.get('implementation')}: {row.get('message')}"
    return None if status == "measured" else Failure(reason) if status == "failed" else reason


def _over_best_peer(rows: Sequence[Row], own: Row) -> Number:
    """The time of the fastest peer over that of this row; a reason if none of a peer's functions ran."""
    case = {key: own[key] for key in ("shape", "dtype", "pass")}
    peers: dict[str, list[float | str]] = {}
    for row in rows:
        name = row["implementation"].split()[0]
        if case.items() <= row.items() and name != "native" and row["rule"] in (own["rule"], "softmax"):
            too_slow = row.get("first call") if row["status"] == "left out" else None
            peers.setdefault(name, []).append(too_slow or _why_not(row) or median(row))
    times = [time for found in peers.values() for time in found if not isinstance(time, str)]
    for name, found in peers.items():
        reasons = [time for time in found if isinstance(time, str)]
        if len(reasons) == len(found) and name not in BACKENDS:
            return next((reason for reason in reasons if isinstance(reason, Failure)), reasons[0])
    return min(times) / median(own) if times else "no peer ran"


def _longest_over_shortest(rows: Sequence[Row], own: Row) -> Number:
    medians = [median(row, "seconds beside other lengths") for row in rows if row["model"] == own["model"]]
    return max(medians) / min(medians)


_NUMBERS: dict[str, Callable[[Sequence[Row], Row], Number]] = {
    "best peer over it": _over_best_peer,
    "of the bandwidth": lambda rows, own: (
        own["limit"]["seconds"] / median(own) if own["limit"]["binding"] == "bandwidth" else None
    ),
    "memory": lambda rows, own: own["memory"]["extra"] / own["memory"]["tensors"],
    # The first call of each rule and pass in its process is at the first shape.
    "first call beyond the second": lambda rows, own: own["first call"] - own["second call"],
    "tokens per second": lambda rows, own: median(own, "tokens per second"),
    "busy": lambda rows, own: "its profile has nothing of a GPU" if own["busy"] is None else own["busy"],
    "peak memory": lambda rows, own: own["peak bytes"],
    "longest over shortest": _longest_over_shortest,
}
