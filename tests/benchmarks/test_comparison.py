"""A comparison notes who cannot take part, who fails and who is wrong, and measures the others."""

from __future__ import annotations

import json

import pytest
import torch
from harness.cases import Inputs, Pass, Shape
from harness.comparison import compare
from harness.contestants import Contestant, Unavailable, Unsuitable, Work, leaf
from harness.kernel_tables import render
from harness.peers import ours
from harness.timing import Call, Clock, CpuClock

SHAPE = Shape("tiny", 2, 2, 8, 4, 4, 2, "a test")
RATES = {"copy": {"4096": 1e9}, "matmul": {"float32": 1e9}}


def contestant(name: str, factor: float = 1.0, error: Exception | None = None, compiles: bool = False) -> Contestant:
    """The sum rule times a factor, or an error in its call."""

    def prepare(shape: Shape, inputs: Inputs) -> Work:
        q, k, v = (leaf(x) for x in (inputs.q, inputs.k, inputs.v))

        def forward() -> torch.Tensor:
            if error is not None:
                raise error
            return factor * ours.OPERATIONS["sum"](q, k, v, backend="reference")[0]

        return Work(forward, [q, k, v], inputs.d_out)

    return Contestant(name, "sum", prepare, compiles=compiles)


def refuse(error: Exception) -> Contestant:
    def prepare(shape: Shape, inputs: Inputs) -> Work:
        raise error

    return Contestant("refuses", "sum", prepare)


def rows_of(
    *others: Contestant, kind: Pass = "forward+backward", clock: Clock | None = None, **options: float
) -> dict[str, dict]:
    rows, _ = compare(
        SHAPE,
        "float32",
        kind,
        [*others, contestant("chunkwise")],
        device="cpu",
        clock=clock or CpuClock(),
        rates=RATES,
        rounds=2,
        **options,
    )
    assert rows[-1]["implementation"] == "chunkwise"
    return {row["implementation"]: row for row in rows}


@pytest.mark.parametrize("kind", ["forward", "forward+backward"])
def test_who_agrees_is_measured(kind: Pass) -> None:
    row = rows_of(contestant("peer"), kind=kind)["peer"]
    assert row["status"] == "measured" and row["seconds"]["rounds"] == 2 and row["difference"] <= 1e-6
    assert row["sizes"] == {"batch": 2, "heads": 2, "time": 8, "key_dim": 4, "value_dim": 4}


def test_the_clock_is_told_what_the_host_takes() -> None:
    hosts: list[float] = []

    class NotingClock(CpuClock):
        def seconds(self, call: Call, repeats: int, host: float = 0.0) -> float:
            hosts.append(host)
            return super().seconds(call, repeats)

    rows = rows_of(contestant("peer"), clock=NotingClock())
    assert len(hosts) == 2 * len(rows) and all(0 < host < 1 for host in hosts)


def test_who_is_wrong_is_not_measured() -> None:
    row = rows_of(contestant("peer", factor=1.01))["peer"]
    assert row["status"] == "failed" and "its output differs by 0.01" in row["message"]
    row = rows_of(contestant("peer", factor=float("nan")))["peer"]
    assert row["status"] == "failed" and "differs by nan" in row["message"]
    json.dumps(row, allow_nan=False)  # it can be written


def test_errors_are_results() -> None:
    row = rows_of(contestant("peer", error=RuntimeError("no kernel\nfor T <= 8")))["peer"]
    assert (row["status"], row["message"]) == ("failed", "RuntimeError: no kernel for T <= 8")
    row = rows_of(refuse(Unavailable("it is not installed")))["refuses"]
    assert (row["status"], row["message"]) == ("unavailable", "it is not installed")
    assert "refuses" not in rows_of(refuse(Unsuitable()))


def test_who_is_slow_is_left_out() -> None:
    row = rows_of(contestant("peer"), longest_call=0.0)["peer"]
    assert row["status"] == "left out" and "over 0 s" in row["message"]
    rows = rows_of(contestant("peer"), contestant("compiler", compiles=True), allowed=0.0, compiling=0.0)
    assert rows["compiler"]["status"] == "left out" and rows["compiler"]["message"] == "no time was left in the budget"
    assert rows["peer"]["status"] == rows["chunkwise"]["status"] == "measured"


def test_the_tables_show_who_was_measured_and_why_others_were_not() -> None:
    rows = rows_of(contestant("SDPA"), refuse(Unavailable("it is not installed")))
    text = render({"rows": list(rows.values()), "rates": RATES, "cut": ["tiny, forward: not measured"]})
    assert "| tiny  | 2 x 2, 8, 4, 4 | sum  | chunkwise |" in text
    assert "- refuses, unavailable (sum, tiny, float32, forward+backward): it is not installed\n" in text
    assert "- tiny, forward: not measured\n" in text
