"""What the project set out to reach, held against results: met, missed and by how much, or unmeasured and why."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from harness.cases import RULES, SHAPES
from harness.peers import causal_product, softmax
from harness.tables import count, markdown, ratio, significant

Record = dict[str, Any]
Row = dict[str, Any]

PAPER_SHAPES = ("lm-small", "lm-medium", "mt-big")
PASSES = ("forward", "forward+backward")
GPU_SHAPES = tuple(name for name, shape in SHAPES.items() if not shape.steps and name != "attention")


@dataclass(frozen=True)
class Comparison:
    """A number that a target speaks of; `reason` says why there is none."""

    label: str
    value: float | None
    reason: str = ""


@dataclass(frozen=True)
class Target:
    """A row of the table of targets.

    Attributes:
        where, what: as a reader would say it.
        limit: the number to reach.
        sense: whether a value must be "at least" the limit or "at most".
        show: writes a value: as a factor, a share, a time.
    """

    where: str
    what: str
    limit: float
    sense: Literal["at least", "at most"] = "at least"
    show: Callable[[float], str] = ratio

    @property
    def text(self) -> str:
        return f"{self.sense} {self.show(self.limit)}"

    def reached(self, value: float) -> bool:
        return value >= self.limit if self.sense == "at least" else value <= self.limit


@dataclass(frozen=True)
class Verdict:
    target: Target
    state: Literal["met", "missed", "unmeasured"]
    measured: str
    comment: str = ""


def judge(target: Target, comparisons: Sequence[Comparison]) -> Verdict:
    """Holds the worst of the comparisons against the target.

    What could not be measured is named; it keeps a target from being met only where nothing was measured at all.
    """
    known = [(c.value, c.label) for c in comparisons if c.value is not None]
    missing = [c for c in comparisons if c.value is None]
    reasons = "; ".join(dict.fromkeys(c.reason for c in missing if c.reason))
    if not known:
        return Verdict(target, "unmeasured", "", reasons or "there are no results")
    worst, label = (min if target.sense == "at least" else max)(known)
    middle = statistics.median(value for value, _ in known)
    measured = f"{target.show(worst)} ({label})"
    if len(known) > 1:
        measured += f"; median of {len(known)}: {target.show(middle)}"
    comments = []
    state: Literal["met", "missed"] = "met" if target.reached(worst) else "missed"
    if state == "missed":
        factor = target.limit / worst if target.sense == "at least" else worst / target.limit
        comments.append(f"by a factor of {significant(factor)}")
        if len(known) > 1:
            met = sum(target.reached(value) for value, _ in known)
            comments.append(f"reached by {met} of {len(known)}")
    if missing:
        labels = ", ".join(c.label for c in missing[:3])
        others = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        comments.append(f"unmeasured: {labels}{others}" + (f" ({reasons})" if reasons else ""))
    return Verdict(target, state, measured, "; ".join(comments))


def evaluate(records: Sequence[Record]) -> list[Verdict]:
    """All targets, in the order of the project's table. A target whose record is not there is unmeasured."""
    by_program = {(record["program"], record["device"]): record for record in records}
    return [verdict for key, judged in _JUDGES.items() for verdict in judged(by_program.get(key))]


def evaluate_one(record: Record) -> list[Verdict]:
    """The targets that this record speaks of."""
    judged = _JUDGES.get((record["program"], record["device"]))
    return [] if judged is None else judged(record)


def render(verdicts: Sequence[Verdict]) -> str:
    """The table in Markdown; nothing for no targets."""
    if not verdicts:
        return ""
    header = ["where", "what", "target", "measured", "verdict"]
    rows = [
        [
            v.target.where,
            v.target.what,
            v.target.text,
            v.measured or "–",
            v.state + (f": {v.comment}" if v.comment else ""),
        ]
        for v in verdicts
    ]
    return markdown(header, rows, left=len(header))


class _Rows:
    """Looks up medians in a record of kernels.py, and says why there is none."""

    def __init__(self, record: Record | None, device: str) -> None:
        self._missing = "" if record is not None else f"kernels.py was not run on a {device}"
        self._rows: dict[tuple[str, str, str, str, str], Row] = {
            (row["shape"], row["dtype"], row["pass"], row["implementation"], row["rule"]): row
            for row in (record["rows"] if record is not None else ())
        }

    def measured(self) -> list[Row]:
        return [row for row in self._rows.values() if row["status"] == "measured"]

    def find(self, shape: str, dtype: str, kind: str, implementation: str, rule: str) -> Row | str:
        """The row, or why it has no time."""
        row = self._rows.get((shape, dtype, kind, implementation, rule))
        if row is None:
            return self._missing or "not in the run, or cut"
        if row["status"] != "measured":
            return f"{implementation}: {row['message']}"
        return row

    def times(
        self, shape: str, dtype: str, kind: str, slow: tuple[str, str], fast: tuple[str, str], label: str
    ) -> Comparison:
        """How many times as long as `fast` `slow` takes; each is (implementation, rule)."""
        rows = [self.find(shape, dtype, kind, *who) for who in (fast, slow)]
        for row in rows:
            if isinstance(row, str):
                return Comparison(label, None, row)
        fast_row, slow_row = rows
        return Comparison(label, _median(slow_row) / _median(fast_row))


def _median(row: Any) -> float:
    return row["seconds"]["median"]


def _cpu_kernels(record: Record | None) -> list[Verdict]:
    threads = f", {count(record['threads'], 'thread')}" if record is not None else ""
    where = f"CPU{threads}, float32"
    rows = _Rows(record, "CPU")

    def native(rule: str) -> tuple[str, str]:
        return "native", rule

    peer = [
        rows.times(shape, "float32", kind, (causal_product.NAME, "sum"), native("sum"), f"{shape}, {kind}")
        for shape in PAPER_SHAPES
        for kind in PASSES
    ]
    build = (record or {}).get("causal_product")
    if any(c.value is not None for c in peer) and (
        build is None or not set(causal_product.FLAGS) <= set(build["flags"])
    ):
        reason = "causal_product is not the build of build_causal_product.py: its flags are unknown"
        peer = [Comparison(c.label, None, reason) for c in peer]
    against_sum = [
        rows.times(shape, "float32", kind, native(rule), native("sum"), f"{rule}, {shape}, {kind}")
        for rule in ("decay", "delta")
        for shape in PAPER_SHAPES
        for kind in PASSES
    ]
    against_chunkwise = [
        rows.times("lm-small", "float32", kind, ("chunkwise", rule), native(rule), f"{rule}, {kind}")
        for rule in ("decay", "delta")
        for kind in PASSES
    ]
    against_softmax = [
        rows.times("attention", "float32", "forward+backward", (softmax.NAME, "softmax"), native(rule), rule)
        for rule in RULES
    ]
    return [
        judge(Target(where, "sum rule against causal_product, forward and forward+backward", 1.5), peer),
        judge(Target(where, "decay and delta: time over that of sum, paper shapes", 2.0, "at most"), against_sum),
        judge(Target(where, "decay and delta against chunkwise, lm-small", 5.0), against_chunkwise),
        judge(Target(where, "SDPA at T = 1024, d = 64, forward+backward", 5.0), against_softmax),
        judge(Target(where, "first call beyond the second", 0.05, "at most", _seconds), _first_calls(rows, "float32")),
    ]


def _first_calls(rows: _Rows, dtype: str) -> list[Comparison]:
    """The first call of each rule and pass in its process, which is at the first shape, and the one after it."""
    comparisons = []
    for rule in RULES:
        for kind in PASSES:
            label = f"{rule}, {kind}"
            row = rows.find(PAPER_SHAPES[0], dtype, kind, "native", rule)
            if isinstance(row, str):
                comparisons.append(Comparison(label, None, row))
            else:
                comparisons.append(Comparison(label, row["first call"] - row["second call"]))
    return comparisons


def _seconds(value: float) -> str:
    return f"{significant(value * 1e3)} ms"


def _share(value: float) -> str:
    return f"{value * 100:.0f}%"


def _generation(record: Record | None) -> list[Verdict]:
    where = "CPU"
    if record is not None:
        where += f", {count(record['threads'], 'thread')}, batch of {record['settings']['batch']}"
    medians = {(row["model"], row["length"]): _median(row) for row in (record["rows"] if record is not None else ())}
    models = list(dict.fromkeys(model for model, _ in medians if model != "transformer"))
    absent = [Comparison("", None, "generation.py was not run as it measures now")] if record is None else []

    def over(model: str, length: int, base: tuple[str, int], label: str) -> Comparison:
        if base not in medians or (model, length) not in medians:
            return Comparison(label, None, "not in the run, or cut")
        return Comparison(label, medians[model, length] / medians[base])

    def against_transformer(length: int) -> list[Comparison]:
        return [over("transformer", length, (model, length), model) for model in models]

    growth, lengths = [], sorted({length for _, length in medians})
    for model in models:
        beside = [
            row["seconds beside other lengths"]["median"]
            for row in (record["rows"] if record is not None else ())
            if row["model"] == model
        ]
        growth.append(Comparison(model, max(beside) / min(beside)))
    span = f"{lengths[0]:,} to {lengths[-1]:,}" if lengths else "the fewest to the most"
    token = "a generated token against fairseq's Transformer"
    flat = f"a generated token, flat: longest time over shortest, after {span} tokens"
    return [
        judge(Target(where, f"{token}, after 1,000", 1.5), absent or against_transformer(1000)),
        judge(Target(where, f"{token}, after 4,000", 3.0), absent or against_transformer(4000)),
        judge(Target(where, flat, 1.1, "at most"), absent or growth),
    ]


def _translation(record: Record | None) -> list[Verdict]:
    token = "a translated token"
    against = Target("CPU", f"{token} against fairseq's Transformer, after 1,024", 1.5)
    flat = Target("CPU", f"{token}, flat: time after the most tokens over that after the fewest", 1.1, "at most")
    if record is None:
        return [judge(target, [Comparison("", None, "translation.py was not run")]) for target in (against, flat)]
    settings, rows = record["settings"], record["rows"]
    where = f"CPU, {count(record['threads'], 'thread')}, {settings['hypotheses']} hypotheses"
    medians = {(row["model"], row["beam"], row["source"], row["length"]): _median(row) for row in rows}
    models = list(dict.fromkeys((row["model"], row["beam"]) for row in rows if row["model"] != "transformer"))
    lengths = [row["length"] for row in rows]

    def times(label: str, slow: tuple[str, int, int, int], fast: tuple[str, int, int, int]) -> Comparison:
        if slow not in medians or fast not in medians:
            return Comparison(label, None, "not in the run, or cut")
        return Comparison(label, medians[slow] / medians[fast])

    faster = [
        times(
            f"{model}, beam {beam}, source of {source:,}",
            ("transformer", beam, source, 1024),
            (model, beam, source, 1024),
        )
        for model, beam in models
        for source in (settings["source"], 1024)
    ]
    # With sources of one length: another source is another task.
    most, fewest = ((settings["source"], length) for length in (max(lengths), min(lengths)))
    growth = [times(f"{model}, beam {beam}", (model, beam, *most), (model, beam, *fewest)) for model, beam in models]
    span = f"{most[1]:,} tokens over that after {fewest[1]:,}"
    return [
        judge(replace(against, where=where), faster),
        judge(replace(flat, where=where, what=f"{token}, flat: time after {span}"), growth),
    ]


def _gpu_kernels(record: Record | None) -> list[Verdict]:
    rows = _Rows(record, "GPU")
    kind = "forward+backward"
    best: list[Comparison] = []
    bandwidth: list[Comparison] = []
    full: list[Comparison] = []
    memory: list[Comparison] = []
    retnet: list[Comparison] = []
    for shape in GPU_SHAPES:
        for rule in RULES:
            label = f"{rule}, {shape}"
            row = rows.find(shape, "bfloat16", kind, "native", rule)
            if isinstance(row, str):
                for comparisons in (best, bandwidth, full, retnet if shape == "retnet" else memory):
                    comparisons.append(Comparison(label, None, row))
                continue
            peers = [
                _median(peer)
                for peer in rows.measured()
                if (peer["shape"], peer["dtype"], peer["pass"]) == (shape, "bfloat16", kind)
                and peer["implementation"] != "native"
                and peer["rule"] in (rule, "softmax")
            ]
            best.append(Comparison(label, min(peers) / _median(row) if peers else None, "no peer ran"))
            if row["limit"]["binding"] == "bandwidth":
                bandwidth.append(Comparison(label, row["limit"]["seconds"] / _median(row)))
            in_float32 = rows.find(shape, "float32", kind, "native", rule)
            if isinstance(in_float32, str):
                full.append(Comparison(label, None, in_float32))
            else:
                full.append(Comparison(label, _median(in_float32) / _median(row)))
            share = row["memory"]["extra"] / row["memory"]["tensors"]
            (retnet if shape == "retnet" else memory).append(Comparison(label, share))
    where = "GPU"
    one_layer = "peak memory of training one layer beyond inputs, outputs and gradients, over these"
    return [
        judge(Target(where, "forward+backward, bfloat16, against the best peer", 1.0), best),
        judge(
            Target(where, "forward+backward, bfloat16: bandwidth where that binds", 0.6, show=_share),
            bandwidth,
        ),
        judge(Target(where, "forward+backward: float32 over bfloat16", 2.5, "at most"), full),
        judge(Target(where, one_layer, 0.25, "at most", _share), memory),
        judge(Target(where, f"{one_layer}, retnet", 1.0, "at most", _share), retnet),
        judge(
            Target(where, "first call beyond the second", 0.05, "at most", _seconds),
            _first_calls(rows, "bfloat16"),
        ),
    ]


def _training(record: Record | None) -> list[Verdict]:
    target = Target("GPU", "training lm-small end to end, words/s against the softmax Transformer in fairseq", 2.5)
    if record is None:
        return [judge(target, [Comparison("", None, "training.py was not run on a GPU")])]
    speeds = {row["model"]: row["words per second"]["median"] for row in record["rows"]}
    softmax_speed = speeds.pop("softmax")
    return [judge(target, [Comparison(model, speed / softmax_speed) for model, speed in speeds.items()])]


_JUDGES: dict[tuple[str, str], Callable[[Record | None], list[Verdict]]] = {
    ("kernels", "cpu"): _cpu_kernels,
    ("generation", "cpu"): _generation,
    ("translation", "cpu"): _translation,
    ("kernels", "cuda"): _gpu_kernels,
    ("training", "cuda"): _training,
}
