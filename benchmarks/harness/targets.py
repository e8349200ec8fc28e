"""What the project set out to reach, held against results: met, missed and by how much, or unmeasured and why."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from harness.cases import RULES, SHAPES
from harness.peers import causal_product, softmax
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

    def others(self, *keys: str) -> list[Row]:
        """What these keys are, once each, in the rows of models that are not softmax attention's."""
        rows = [row for row in self.record["rows"] if row["model"] not in ("transformer", "softmax")]
        return [
            dict(zip(keys, values, strict=True)) for values in dict.fromkeys(tuple(r[k] for k in keys) for r in rows)
        ]


Compare = Callable[[Results], Sequence[tuple[str, Number]]]


class Target(NamedTuple):
    """A row of the table of targets.

    Attributes:
        sense: whether a value must be "at least" the limit or "at most".
        what: as a reader would say it; {fewest} and {most} stand for the lengths that were measured.
        limit: the number to reach.
        compare: makes what is compared, of which the worst counts, each with a label.
        show: writes a value: as a factor, a share, a time.
    """

    sense: str
    what: str
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
    for target in targets:
        numbers = [("", absent)] if record is None else target.compare(Results(record))
        text = f"{target.sense} {target.show(target.limit)}"
        verdicts.append(Verdict(unknown, target.what.format(**words), text, *judge(target, numbers)))
    return verdicts


def render(verdicts: Sequence[Verdict]) -> str:
    """The table in Markdown; nothing for no targets."""
    return markdown(Verdict._fields, verdicts, left=len(Verdict._fields)) if verdicts else ""


def _each(label: str, number: Callable[[Results, Row], Number | None], **choices: Sequence[str]) -> Compare:
    """Of each case of these choices a number; None is none."""

    def compare(results: Results) -> list[tuple[str, Number]]:
        cases = [dict(zip(choices, case, strict=True)) for case in itertools.product(*choices.values())]
        numbers = [(label.format(**case), number(results, case | {"pass": case["kind"]})) for case in cases]
        return [(text, number) for text, number in numbers if number is not None]

    return compare


def _over(slow: Row, fast: Row) -> Callable[[Results, Row], Number]:
    """A case with the changes `slow` over that with the changes `fast`."""
    return lambda results, case: results.over(results.find(case, **slow), results.find(case, **fast))


def _over_built_peer(results: Results, case: Row) -> Number:
    """causal_product over the sum rule, if it was compiled as build_causal_product.py does."""
    times = _over({"implementation": causal_product.NAME}, _NATIVE)(results, case)
    build = results.record.get("causal_product") or {"flags": []}
    if isinstance(times, str) or set(causal_product.FLAGS) <= set(build["flags"]):
        return times
    return "causal_product is not the build of build_causal_product.py: its flags are unknown"


def _of_native(number: Callable[[Results, Row], Number | None]) -> Callable[[Results, Row], Number | None]:
    """A number of the native kernels' row at a case, or why there is none."""

    def find(results: Results, case: Row) -> Number | None:
        row = results.find(case, **_NATIVE)
        return row if isinstance(row, str) else number(results, row)

    return find


def _over_best_peer(results: Results, own: Row) -> Number:
    case = {key: own[key] for key in ("shape", "dtype", "pass")}
    peers = [
        row["seconds"]["median"]
        for row in results.record["rows"]
        if row["status"] == "measured" and row["implementation"] != "native" and case.items() <= row.items()
        if row["rule"] in (own["rule"], "softmax")
    ]
    return min(peers) / own["seconds"]["median"] if peers else "no peer ran"


def _of_bandwidth(results: Results, own: Row) -> float | None:
    limit = own["limit"]
    return limit["seconds"] / own["seconds"]["median"] if limit["binding"] == "bandwidth" else None


def _full_precision(results: Results, own: Row) -> Number:
    return results.over(results.find(own, dtype="float32"), own)


def _memory(results: Results, own: Row) -> float:
    return own["memory"]["extra"] / own["memory"]["tensors"]


def _next_token(results: Results, length: int) -> list[tuple[str, Number]]:
    cases = [case | {"length": length} for case in results.others("model")]
    return [(c["model"], results.over(results.find(c, model="transformer"), results.find(c))) for c in cases]


def _next_token_growth(results: Results) -> list[tuple[str, Number]]:
    medians: dict[str, list[float]] = {}
    for row in results.record["rows"]:
        if row["model"] != "transformer":
            medians.setdefault(row["model"], []).append(row["seconds beside other lengths"]["median"])
    return [(model, max(known) / min(known)) for model, known in medians.items()]


def _translated_token(results: Results) -> list[tuple[str, Number]]:
    sources = (results.record["settings"]["source"], 1024)
    cases = [{**c, "source": source, "length": 1024} for c in results.others("model", "beam") for source in sources]
    return [
        (
            "{model}, beam {beam}, source of {source:,}".format(**c),
            results.over(results.find(c, model="transformer"), results.find(c)),
        )
        for c in cases
    ]


def _translated_token_growth(results: Results) -> list[tuple[str, Number]]:
    """With sources of one length: another source is another task."""
    lengths = [row["length"] for row in results.record["rows"]]
    one = {"source": results.record["settings"]["source"]}
    most, fewest = (one | {"length": length} for length in (max(lengths), min(lengths)))
    return [
        ("{model}, beam {beam}".format(**c), _over(most, fewest)(results, c)) for c in results.others("model", "beam")
    ]


def _training_speed(results: Results) -> list[tuple[str, Number]]:
    speeds = {row["model"]: row["words per second"]["median"] for row in results.record["rows"]}
    return [(model, speed / speeds["softmax"]) for model, speed in speeds.items() if model != "softmax"]


_at_least, _at_most = (partial(Target, sense) for sense in ("at least", "at most"))


def _first_call(dtype: str) -> Target:
    """The first call of each rule and pass in its process, which is at the first shape, and the one after it."""
    number = _of_native(lambda results, own: own["first call"] - own["second call"])
    compare = _each("{rule}, {kind}", number, rule=RULES, kind=PASSES, shape=PAPER_SHAPES[:1], dtype=[dtype])
    return _at_most("first call beyond the second", 0.05, compare, milliseconds)


def _on_gpu(
    target: Callable[..., Target],
    what: str,
    limit: float,
    number: Callable[[Results, Row], Number | None],
    show: Callable[[float], str] = ratio,
    shapes: Sequence[str] = GPU_SHAPES,
) -> Target:
    """A target of training in bfloat16."""
    compare = _each("{rule}, {shape}", _of_native(number), shape=shapes, rule=RULES, dtype=["bfloat16"], **_BOTH)
    return target(what, limit, compare, show)


_NATIVE = {"implementation": "native"}
_SOFTMAX = {"implementation": softmax.NAME, "rule": "softmax"}
# Choices of cases.
_FLOAT32 = {"dtype": ["float32"]}
_TWO = {"rule": ["decay", "delta"], **_FLOAT32}
_PAPER = {"shape": PAPER_SHAPES, "kind": PASSES}
_FIRST_SHAPE = _PAPER | {"shape": PAPER_SHAPES[:1]}
_BOTH = {"kind": ["forward+backward"]}
_NOT_RETNET = [shape for shape in GPU_SHAPES if shape != "retnet"]

_TOKEN = "token against fairseq's Transformer, after"
_LAYER = "peak memory of training one layer beyond inputs, outputs and gradients, over these"
# By program and device: what is said where there are no results; where, without them and with them; and the targets.
_TARGETS: dict[tuple[str, str], tuple[str, str, str, list[Target]]] = {
    ("kernels", "cpu"): (
        *("kernels.py was not run on a CPU", "CPU, float32", "CPU, {threads}, float32"),
        [
            _at_least(
                *("sum rule against causal_product, forward and forward+backward", 1.5),
                _each("{shape}, {kind}", _over_built_peer, rule=["sum"], **_PAPER, **_FLOAT32),
            ),
            _at_most(
                *("decay and delta: time over that of sum, paper shapes", 2.0),
                _each("{rule}, {shape}, {kind}", _over(_NATIVE, _NATIVE | {"rule": "sum"}), **_TWO, **_PAPER),
            ),
            _at_least(
                *("decay and delta against chunkwise, lm-small", 5.0),
                _each("{rule}, {kind}", _over({"implementation": "chunkwise"}, _NATIVE), **_TWO, **_FIRST_SHAPE),
            ),
            _at_least(
                *("SDPA at T = 1024, d = 64, forward+backward", 5.0),
                _each("{rule}", _over(_SOFTMAX, _NATIVE), rule=RULES, shape=["attention"], **_BOTH, **_FLOAT32),
            ),
            _first_call("float32"),
        ],
    ),
    ("generation", "cpu"): (
        *("generation.py was not run as it measures now", "CPU", "CPU, {threads}, batch of {batch}"),
        [
            _at_least(f"a generated {_TOKEN} 1,000", 1.5, partial(_next_token, length=1000)),
            _at_least(f"a generated {_TOKEN} 4,000", 3.0, partial(_next_token, length=4000)),
            _at_most(
                *("a generated token, flat: longest time over shortest, after {fewest} to {most} tokens", 1.1),
                _next_token_growth,
            ),
        ],
    ),
    ("translation", "cpu"): (
        *("translation.py was not run", "CPU", "CPU, {threads}, {hypotheses} hypotheses"),
        [
            _at_least(f"a translated {_TOKEN} 1,024", 1.5, _translated_token),
            _at_most(
                *("a translated token, flat: time after {most} tokens over that after {fewest}", 1.1),
                _translated_token_growth,
            ),
        ],
    ),
    ("kernels", "cuda"): (
        *("kernels.py was not run on a GPU", "GPU", "GPU"),
        [
            _on_gpu(_at_least, "forward+backward, bfloat16, against the best peer", 1.0, _over_best_peer),
            _on_gpu(_at_least, "forward+backward, bfloat16: bandwidth where that binds", 0.6, _of_bandwidth, share),
            _on_gpu(_at_most, "forward+backward: float32 over bfloat16", 2.5, _full_precision),
            _on_gpu(_at_most, _LAYER, 0.25, _memory, share, shapes=_NOT_RETNET),
            _on_gpu(_at_most, f"{_LAYER}, retnet", 1.0, _memory, share, shapes=["retnet"]),
            _first_call("bfloat16"),
        ],
    ),
    ("training", "cuda"): (
        *("training.py was not run on a GPU", "GPU", "GPU"),
        [
            _at_least(
                *("training lm-small end to end, words/s against the softmax Transformer in fairseq", 2.5),
                _training_speed,
            )
        ],
    ),
}
