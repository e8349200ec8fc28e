"""The message about the backend that runs: once, and loudly where kernels are missing."""

import logging

import pytest
import torch

from fairseq_fastweights import ops
from fairseq_fastweights.ops import backends, libraries
from fairseq_fastweights.ops.backends import say_again
from tests.ops.rules import DEVICE, RULE

LOST = "the kernels were lost; build them with care"


@pytest.fixture
def said(caplog):
    """The messages of calls that a function makes: levels and texts."""
    caplog.set_level(logging.INFO, "fairseq_fastweights")

    def said(*calls):
        say_again()
        caplog.clear()
        for call in calls:
            call()
        return [(record.levelname, record.getMessage()) for record in caplog.records]

    yield said
    say_again()


def run(name: str, backend: str = "auto", steps: int = 3):
    return lambda: RULE[name].run(RULE[name].inputs(T=steps, requires_grad=False), backend)


def scan():
    u, A = torch.rand(1, 3, 2, device=DEVICE), -torch.rand(2, 4, device=DEVICE)
    ops.selective_scan(u, u, A, torch.rand(1, 3, 4, device=DEVICE), torch.rand(1, 3, 4, device=DEVICE))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="names the CPU")
def test_backends_are_said_once_and_missing_kernels_are_a_warning(said, monkeypatch):
    on_cpu = (
        f"native ({backends.cpu_instruction_set()}) on the CPU" if backends.EXTENSIONS["cpu"] == "cpu" else "native"
    )
    of_native = ("INFO", f"fast weight rules run by {on_cpu}")
    assert said(run("sum"), run("delta", steps=1), run("decay"), run("sum"), scan) == [of_native]
    by_reference = ("INFO", "fast weight rules run by reference on the CPU")
    assert said(run("sum", "reference"), run("delta", "reference"), run("sum")) == [by_reference, of_native]
    own = ops.Rule("own", (), ops.RULES["sum"].reference)
    x = torch.rand(1, 2, 1, 3)
    of_own = ("INFO", "fast weight rules run by reference on the CPU: the own rule has no compiled kernel")
    assert said(lambda: own(x, x, x)) == [of_own]
    meta = x.to("meta")
    assert said(lambda: ops.sum_rule(meta, meta, meta)) == []

    monkeypatch.setitem(libraries._outcomes, "cpu", LOST)
    missing = ("WARNING", f"fast weight rules run by chunkwise on the CPU: {LOST}")
    assert said(run("sum", steps=1), run("delta"), scan) == [missing]
    assert said(run("sum", "chunkwise")) == [("INFO", "fast weight rules run by chunkwise on the CPU")]
    torch.compiler.reset()
    compiled = torch.compile(lambda x: ops.sum_rule(x, x, x)[0] + 1, backend="eager", fullgraph=True)
    assert said(lambda: compiled(x), lambda: compiled(x)) == [missing]
