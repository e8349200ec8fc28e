"""What the project set out to reach, held against results: met, missed and by how much, or unmeasured and why."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from harness.cases import RULES, SHAPES
from harness.contestants import BUILD_FLAGS, CAUSAL_PRODUCT, SOFTMAX
from harness.tables import count, markdown, milliseconds, ratio, share, significant

Record = dict[str, Any]
Row = dict[str, Any]

PAPER_SHAPES = ("lm-small", "lm-medium", "mt-big")
PASSES = ("forward", "forward+backward")
GPU_SHAPES = tuple(name for name, shape in SHAPES.items() if not shape.steps and name != "attention")

# What tells a row of a program's results from its others.
_KEYS = {
    "kernels": ("shape", "dtype", "pass", "implementation", "rule"),
    "generation": ("model", "length"),
    "translation": ("model", "beam", "source", "length"),
    "training": ("model",),
}


# A number that a target speaks of, or the reason why there is none.
Number = float | str


class Results:
    """A record, and its rows by what they are of."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._keys = _KEYS[record["program"]]
        self._rows = {tuple(row[key] for key in self._keys): row for row in record["rows"]}

    def find(self, wanted: Row, **changes: Any) -> Row | str:
        """The row that is like the one that is wanted, but for the changes; or why it has no time."""
        row = self._rows.get(tuple((wanted | changes)[key] for key in self._keys))
        if row is None:
            return "not in the run, or cut"
        if row.get("status", "measured") != "measured":
            return f"{row['implementation']}: {row['message']}"
        return row

    def over(self, slow: Row | str, fast: Row | str) -> Number:
        """How many times as long the first row's call takes, or why nobody knows."""
        if isinstance(fast, str) or isinstance(slow, str):
            return fast if isinstance(fast, str) else str(slow)
        return slow["seconds"]["median"] / fast["seconds"]["median"]


Choose = Callable[[Record], Sequence[Any]]
Compare = Callable[[Results], Sequence[tuple[str, Number]]]


class Target(NamedTuple):
    """A number to reach.

    Attributes:
        sense: whether a value must be "at least" the limit or "at most".
        compare: makes what is compared, of which the worst counts, each with a label.
        show: writes a value: as a factor, a share, a time.
    """

    sense: str
    limit: float
    compare: Compare
    show: Callable[[float], str] = ratio


class Verdict(NamedTuple):
    """A row of the table, in words. `verdict` begins with "met", "missed" or "unmeasured"."""

    where: str
    what: str
    target: str
    measured: str
    verdict: str


def judge(target: Target, numbers: Sequence[tuple[str, Number]]) -> tuple[str, str]:
    """Holds the worst of the numbers against the target: what was measured, and the verdict.

    What could not be measured is named; it keeps a target from being met only where nothing was measured at all.
    """
    known = [(value, label) for label, value in numbers if not isinstance(value, str)]
    missing = [(label, value) for label, value in numbers if isinstance(value, str)]
    reasons = "; ".join(dict.fromkeys(reason for _, reason in missing))
    if not known:
        return "–", f"unmeasured: {reasons or 'there are no results'}"
    least = target.sense == "at least"
    worst, label = min(known) if least else max(known)
    reached = [value >= target.limit if least else value <= target.limit for value, _ in known]
    measured = f"{target.show(worst)} ({label})"
    comments = []
    if not all(reached):
        factor = target.limit / worst if least else worst / target.limit
        comments.append(f"by a factor of {significant(factor)}")
    if len(known) > 1:
        measured += f"; median of {len(known)}: {target.show(statistics.median(value for value, _ in known))}"
        comments += [f"reached by {sum(reached)} of {len(known)}"] * (not all(reached))
    if missing:
        labels = ", ".join(label for label, _ in missing[:3])
        others = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        comments.append(f"unmeasured: {labels}{others} ({reasons})")
    state = "met" if all(reached) else "missed"
    return measured, f"{state}: {'; '.join(comments)}" if comments else state


def evaluate(records: Sequence[Record]) -> list[Verdict]:
    """All targets, in the order of the project's table. A target whose record is not there is unmeasured."""
    known = {(record["program"], record["device"]): record for record in records}
    return [verdict for key in _TARGETS for verdict in _evaluate(key, known.get(key))]


def evaluate_one(record: Record) -> list[Verdict]:
    """The targets that this record speaks of."""
    key = record["program"], record["device"]
    return _evaluate(key, record) if key in _TARGETS else []


def _evaluate(key: tuple[str, str], record: Record | None) -> list[Verdict]:
    absent, unknown, where, targets = _TARGETS[key]
    words: dict[str, Any] = {"fewest": "the fewest", "most": "the most"}
    if record is not None:
        lengths = [row["length"] for row in record["rows"] if "length" in row]
        if lengths:
            words = {"fewest": f"{min(lengths):,}", "most": f"{max(lengths):,}"}
        unknown = where.format(threads=count(record["threads"], "thread"), **record.get("settings", {}))
    verdicts = []
    for what, target in targets.items():
        numbers = [("", absent)] if record is None else target.compare(Results(record))
        text = f"{target.sense} {target.show(target.limit)}"
        verdicts.append(Verdict(unknown, what.format(**words), text, *judge(target, numbers)))
    return verdicts


def render(verdicts: Sequence[Verdict]) -> str:
    """The table in Markdown; nothing for no targets."""
    return markdown(Verdict._fields, verdicts, left=len(Verdict._fields)) if verdicts else ""


def _each(
    label: str, number: Callable[[Results, Row], Number | None], choices: dict[str, Sequence[Any] | Choose]
) -> Compare:
    """Of each case of these choices a number; None is none."""

    def compare(results: Results) -> list[tuple[str, Number]]:
        chosen = [choice(results.record) if callable(choice) else choice for choice in choices.values()]
        cases = [dict(zip(choices, case, strict=True)) for case in itertools.product(*chosen)]
        numbers = [(label.format(**case), number(results, case)) for case in cases]
        return [(text, number) for text, number in numbers if number is not None]

    return compare


def _over(slow: Row, fast: Row) -> Callable[[Results, Row], Number]:
    """A case with the changes `slow` over that with the changes `fast`."""
    return lambda results, case: results.over(results.find(case, **slow), results.find(case, **fast))


def _over_built_peer(results: Results, case: Row) -> Number:
    """causal_product over the sum rule, if it was compiled as build_causal_product.py does."""
    times = _over({"implementation": CAUSAL_PRODUCT}, _NATIVE)(results, case)
    build = results.record.get("causal_product") or {"flags": []}
    if isinstance(times, str) or set(BUILD_FLAGS) <= set(build["flags"]):
        return times
    return "causal_product is not the build of build_causal_product.py: its flags are unknown"


def _of_native(number: Callable[[Results, Row], Number | None]) -> Callable[[Results, Row], Number | None]:
    """A number of the native kernels' row at a case, or why there is none."""

    def find(results: Results, case: Row) -> Number | None:
        row = results.find(case, **_NATIVE)
        return row if isinstance(row, str) else number(results, row)

    return find


@_of_native
def _over_best_peer(results: Results, own: Row) -> Number:
    case = {key: own[key] for key in ("shape", "dtype", "pass")}
    peers = [
        row["seconds"]["median"]
        for row in results.record["rows"]
        if row["status"] == "measured" and row["implementation"] != "native" and case.items() <= row.items()
        if row["rule"] in (own["rule"], "softmax")
    ]
    return min(peers) / own["seconds"]["median"] if peers else "no peer ran"


@_of_native
def _of_bandwidth(results: Results, own: Row) -> float | None:
    limit = own["limit"]
    return limit["seconds"] / own["seconds"]["median"] if limit["binding"] == "bandwidth" else None


@_of_native
def _memory(results: Results, own: Row) -> float:
    return own["memory"]["extra"] / own["memory"]["tensors"]


@_of_native
def _beyond_second(results: Results, own: Row) -> float:
    return own["first call"] - own["second call"]


def _lengths(results: Results, case: Row) -> Number:
    """The time after the most tokens over that after the fewest."""
    lengths = [row["length"] for row in results.record["rows"]]
    return _over({"length": max(lengths)}, {"length": min(lengths)})(results, case)


def _longest_over_shortest(results: Results, case: Row) -> float:
    rows = [row for row in results.record["rows"] if row["model"] == case["model"]]
    medians = [row["seconds beside other lengths"]["median"] for row in rows]
    return max(medians) / min(medians)


def _speed(results: Results, case: Row) -> float:
    speeds = {row["model"]: row["words per second"]["median"] for row in results.record["rows"]}
    return speeds[case["model"]] / speeds["softmax"]


def _all(key: str, *but: str) -> Choose:
    """All values of a column of the rows, in order, but for some."""
    return lambda record: [value for value in dict.fromkeys(row[key] for row in record["rows"]) if value not in but]


def _source(record: Record) -> list[int]:
    """The length of the sources that are not as long as the target: others are another task."""
    return [record["settings"]["source"]]


_at_least, _at_most = (partial(Target, sense) for sense in ("at least", "at most"))
_NATIVE, _CHUNKWISE = {"implementation": "native"}, {"implementation": "chunkwise"}
_SOFTMAX = {"implementation": SOFTMAX, "rule": "softmax"}
_MODELS = {"model": _all("model", "transformer", "softmax")}
_TRANSLATIONS = {"beam": _all("beam"), **_MODELS}
_PAPER = {"shape": PAPER_SHAPES, "pass": PASSES, "dtype": ["float32"]}
_TWO = {"rule": ["decay", "delta"], **_PAPER}
_ATTENTION = {"rule": RULES, "shape": ["attention"], "pass": ["forward+backward"], "dtype": ["float32"]}
_GPU = {"shape": GPU_SHAPES, "rule": RULES, "pass": ["forward+backward"], "dtype": ["bfloat16"]}
_RETNET = _GPU | {"shape": ["retnet"]}
_NOT_RETNET = _GPU | {"shape": [shape for shape in GPU_SHAPES if shape != "retnet"]}
_over_transformer = _over({"model": "transformer"}, {})


def _first_call(dtype: str) -> Target:
    """The first call of each rule and pass in its process, which is at the first shape, and the one after it."""
    choices = {"rule": RULES, "pass": PASSES, "shape": PAPER_SHAPES[:1], "dtype": [dtype]}
    return _at_most(0.05, _each("{rule}, {pass}", _beyond_second, choices), milliseconds)


_TOKEN = "token against fairseq's Transformer, after"
_LAYER = "peak memory of training one layer beyond inputs, outputs and gradients, over these"
# By program and device: what is said without results; where, without them and with them; and the targets by what a
# reader would call them, with {fewest} and {most} for the lengths that were measured.
_TARGETS: dict[tuple[str, str], tuple[str, str, str, dict[str, Target]]] = {
    ("kernels", "cpu"): (
        *("kernels.py was not run on a CPU", "CPU, float32", "CPU, {threads}, float32"),
        {
            "sum rule against causal_product, forward and forward+backward": _at_least(
                1.5, _each("{shape}, {pass}", _over_built_peer, {"rule": ["sum"], **_PAPER})
            ),
            "decay and delta: time over that of sum, paper shapes": _at_most(
                2.0, _each("{rule}, {shape}, {pass}", _over(_NATIVE, _NATIVE | {"rule": "sum"}), _TWO)
            ),
            "decay and delta against chunkwise, lm-small": _at_least(
                5.0, _each("{rule}, {pass}", _over(_CHUNKWISE, _NATIVE), _TWO | {"shape": ["lm-small"]})
            ),
            "SDPA at T = 1024, d = 64, forward+backward": _at_least(
                5.0, _each("{rule}", _over(_SOFTMAX, _NATIVE), _ATTENTION)
            ),
            "first call beyond the second": _first_call("float32"),
        },
    ),
    ("generation", "cpu"): (
        *("generation.py was not run as it measures now", "CPU", "CPU, {threads}, batch of {batch}"),
        {
            f"a generated {_TOKEN} 1,000": _at_least(
                1.5, _each("{model}", _over_transformer, {**_MODELS, "length": [1000]})
            ),
            f"a generated {_TOKEN} 4,000": _at_least(
                3.0, _each("{model}", _over_transformer, {**_MODELS, "length": [4000]})
            ),
            "a generated token, flat: longest time over shortest, after {fewest} to {most} tokens": _at_most(
                1.1, _each("{model}", _longest_over_shortest, _MODELS)
            ),
        },
    ),
    ("translation", "cpu"): (
        *("translation.py was not run", "CPU", "CPU, {threads}, {hypotheses} hypotheses"),
        {
            f"a translated {_TOKEN} 1,024": _at_least(
                1.5,
                _each(
                    "{model}, beam {beam}, source of {source:,}",
                    _over_transformer,
                    {**_TRANSLATIONS, "source": lambda record: [*_source(record), 1024], "length": [1024]},
                ),
            ),
            "a translated token, flat: time after {most} tokens over that after {fewest}": _at_most(
                1.1, _each("{model}, beam {beam}", _lengths, {**_TRANSLATIONS, "source": _source})
            ),
        },
    ),
    ("kernels", "cuda"): (
        *("kernels.py was not run on a GPU", "GPU", "GPU"),
        {
            "forward+backward, bfloat16, against the best peer": _at_least(
                1.0, _each("{rule}, {shape}", _over_best_peer, _GPU)
            ),
            "forward+backward, bfloat16: bandwidth where that binds": _at_least(
                0.6, _each("{rule}, {shape}", _of_bandwidth, _GPU), share
            ),
            "forward+backward: float32 over bfloat16": _at_most(
                2.5, _each("{rule}, {shape}", _over(_NATIVE | {"dtype": "float32"}, _NATIVE), _GPU)
            ),
            _LAYER: _at_most(0.25, _each("{rule}, {shape}", _memory, _NOT_RETNET), share),
            f"{_LAYER}, retnet": _at_most(1.0, _each("{rule}, {shape}", _memory, _RETNET), share),
            "first call beyond the second": _first_call("bfloat16"),
        },
    ),
    ("training", "cuda"): (
        *("training.py was not run on a GPU", "GPU", "GPU"),
        {
            "training lm-small end to end, words/s against the softmax Transformer in fairseq": _at_least(
                2.5, _each("{model}", _speed, _MODELS)
            ),
        },
    ),
}
