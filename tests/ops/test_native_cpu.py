"""The CPU kernels: heads and value columns that threads share, rows that share scratch memory, instruction sets."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_fastweights import ops
from fairseq_fastweights.ops import backends, libraries
from tests.ops import test_selective_scan as scans
from tests.ops.agreement import TOLERANCE, assert_agrees, assert_close, assert_same, parts
from tests.ops.results import cotangents, definition, detached, differentiate, named, outcome
from tests.ops.rules import LAYOUT, RULES, Inputs, RuleCase, deal, on_cpu

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@on_cpu
@pytest.mark.parametrize("rule", RULES)
def test_threads_change_no_bit_but_where_they_share_heads(rule):
    """3 or 7 threads divide 2 heads by value columns, into blocks of 32 and 8, and of 16, 16 and 8."""
    # The inputs that all value columns share: the blocks' gradients are added up.
    shared = {"q", "k", *(gate.name for gate in rule.record.gates if gate.per != "value")}
    inputs, few = rule.inputs(B=3, T=80, H=5, K=33, V=20), rule.inputs(B=1, T=104, H=2, K=64, V=40)
    with threads(1):
        alone, whole = (outcome(rule, "native", x) for x in (inputs, few))
    for count in (2, 3):
        with threads(count):
            assert_same(outcome(rule, "native", inputs), alone, f"with {count} threads")
    for count in (3, 7):
        with threads(count):
            assert_agrees(rule, "native", few)
            divided = outcome(rule, "native", few)
            assert_same(outcome(rule, "native", few), divided, "the second time")
        for name, x in divided.items():
            # Sums over columns are rounded in another order; so they show that there were blocks.
            assert torch.equal(x, whole[name]) != (name.removeprefix("gradient of ") in shared), name


@on_cpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("rule", RULES)
def test_divided_heads_in_every_dtype(rule, dtype):
    """Parts are added up in the dtype of the state and rounded once; two rows, in time-first memory or not."""
    inputs = rule.inputs(B=2, T=66, H=1, K=65, V=64, dtype=dtype)
    laid = inputs | {n: LAYOUT["as fairseq"](inputs[n].detach()).requires_grad_() for n in ("q", "v")}
    with threads(4):
        assert_agrees(rule, "native", inputs)
        assert_same(outcome(rule, "native", laid), outcome(rule, "native", inputs), "in time-first memory")


# States that go step by step, in few rows or more, and products of matrices backwards, then in both directions. One of
# these numbers of keys fills a tile.
@pytest.mark.parametrize(("K", "V"), [(1, 5), (3, 5), (7, 5), (16, 16), (33, 35), (65, 66)])
@pytest.mark.parametrize(
    ("rule", "T"), [*((rule, 37) for rule in [*RULES, *scans.SCANNED]), *((rule, 1) for rule in scans.SCANNED)]
)
def test_what_is_not_finite_stays_in_its_row(rule, T, K, V):
    """A number of a row of the batch that is infinite or NaN, in whichever input, changes no bit of the others."""
    drawn = rule.inputs(B=3, T=T, H=1, K=K, V=V)
    weights = dict(zip(("d_out", "d_final_state"), cotangents(rule.run(drawn, "native")), strict=True))
    given = {name: x.detach() for name, x in (drawn | weights).items() if x is not None}
    shared = ("A", "D")  # of all rows

    def other_rows(changed: Inputs) -> Inputs:
        values = given | changed
        inputs = {name: values[name].requires_grad_() if name in values else None for name in drawn}
        outputs = rule.run(inputs, "native")
        grads = differentiate(outputs, inputs, (values["d_out"], values["d_final_state"]))
        return {name: x[1:] for name, x in named(outputs, grads).items() if name[-1] not in shared}

    with threads(1):  # on a CPU all rows then take the same scratch memory
        expected = other_rows({})
        for name, value in itertools.product(given.keys() - shared, (torch.inf, torch.nan)):
            changed = given[name].clone()
            changed[0].view(-1)[changed[0].numel() // 2] = value
            assert_same(other_rows({name: changed}), expected, f"where {name} has {value}")


# Instruction sets: each in a process of its own, as a process has one. They divide states by other sizes.

KNOWN = ["baseline", "avx2", "avx512"]
SIZES = [(2, 5), (3, 9), (4, 20), (5, 10), (7, 12), (9, 3), (13, 24), (16, 16), (33, 50), (65, 70)]
CASES = [(*case, case[0].regimes) for case in deal(RULES, SIZES, [torch.float32, torch.float64])]
CASES += [(rule, (20, 33), dtype, ("ordinary",)) for rule in RULES for dtype in (torch.bfloat16, torch.float16)]


def drawn() -> Iterator[tuple[RuleCase, Inputs, Inputs, list[str], float]]:
    """For each case its inputs, those of a step, the names of its rows, and a tolerance."""
    for rule, (K, V), dtype, regimes in CASES:
        inputs = rule.in_regimes(regimes, B=1, T=33, K=K, V=V, dtype=dtype)
        step = {n: x if x is None or n == "initial_state" else x[:, :1] for n, x in detached(inputs).items()}
        yield rule, inputs, step, [f"{rule.name}, {K} x {V}, {dtype}, {x}" for x in regimes], TOLERANCE[dtype]
    for i, (T, V, K) in enumerate(scans.SIZES):
        for how in (*scans.HOW[i % 2 :: 2], {"regime": scans.REGIMES[i % 5]}):
            inputs = scans.SCAN.inputs(T=min(T, 75), V=V, K=K, **how)
            step = scans.step_of(inputs)
            yield scans.SCAN, inputs, step, [], scans.tolerance_of(inputs)


@pytest.fixture(scope="module")
def every_set() -> str:
    """A library of all instruction sets, where the checkout's own is of this processor's best one alone."""
    if named := os.environ.get("FASTWEIGHTS_NATIVE_CPU"):  # with sanitizers, or with a fault
        return named
    from native_toolchain import HostCompiler, Unavailable  # which the processes below have not on their path

    try:
        HostCompiler.find()
    except Unavailable as reason:
        pytest.skip(str(reason))
    folder = ROOT / "build" / "every-set"
    environment = os.environ | {"FASTWEIGHTS_BUILD": "cpu", "FASTWEIGHTS_BUILD_ISA": "all"}
    subprocess.run([sys.executable, "tools/native_build.py", "--into", folder], cwd=ROOT, env=environment, check=True)
    library = str(folder / "_native_cpu.so")
    sets = libraries.cpu_instruction_sets(library)
    assert sets == KNOWN[: len(sets)]
    return library


def in_a_process(instruction_set: str, library: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    chosen = {"FASTWEIGHTS_CPU_ISA": instruction_set, "FASTWEIGHTS_NATIVE_CPU": library}
    environment = os.environ | chosen | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


@on_cpu
@pytest.mark.slow
def test_every_instruction_set_agrees(every_set, tmp_path):
    """Over all rules and regimes. The other tests run the one of this process."""
    for name in libraries.cpu_instruction_sets(every_set):
        if name == backends.cpu_instruction_set():
            continue
        result = in_a_process(name, every_set, "-m", "tests.ops.test_native_cpu", str(tmp_path / name))
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip() == name
        found = torch.load(tmp_path / name)
        for (rule, inputs, of_step, rows, tolerance), (whole, step) in zip(drawn(), found, strict=True):
            expected = definition(rule, inputs, cotangents((whole["out"], whole["final_state"])))
            assert_close(parts(whole, rows), parts(expected, rows), tolerance)
            assert_close(parts(step, rows), parts(definition(rule, of_step, None), rows), tolerance)


@on_cpu
def test_sixteen_bits_are_rounded_to_the_nearest():
    """Sums of three quarters of a unit in the last place and of halves, in every lane: float32 holds them."""
    for dtype in (torch.bfloat16, torch.float16):
        unit = torch.finfo(dtype).eps
        added = unit * torch.tensor([0.75, 0.5, 0.25, 1.5, -0.25, -0.5]).repeat(6)
        for T in (1, 2):  # a step of a state that has been read, and a sequence
            v = torch.stack([torch.ones(36), added])[-T:].to(dtype).view(1, T, 1, 36)
            one = torch.ones(1, T, 1, 1, dtype=dtype)
            state = torch.ones(1, 1, 1, 36) if T == 1 else None
            out, _ = ops.sum_rule(one, one, v, initial_state=state, backend="native")
            assert torch.equal(out[0, -1, 0], (1 + added).to(dtype)), (dtype, T)


def main() -> None:
    """The program that the processes of `test_every_instruction_set_agrees` run."""
    test_sixteen_bits_are_rounded_to_the_nearest()
    results = []
    for rule, inputs, step, *_ in drawn():
        whole = {name: x.detach() for name, x in outcome(rule, "native", inputs).items()}
        results.append((whole, named(rule.run(step, "native"))))
    torch.save(results, sys.argv[1])
    print(backends.cpu_instruction_set())


@on_cpu
@pytest.mark.slow
def test_an_instruction_set_that_is_not_there_is_named(every_set):
    """And of those that are there, the last is the one that is taken."""
    asks = "from fairseq_fastweights.ops import backends; print(backends.cpu_instruction_set())"
    result = in_a_process("mmx", every_set, "-c", asks)
    assert result.returncode != 0
    there = libraries.cpu_instruction_sets(every_set)
    assert f"FASTWEIGHTS_CPU_ISA is mmx; here it may be one of {', '.join(there)}\n" in result.stderr
    assert in_a_process("", every_set, "-c", asks).stdout.strip() == there[-1]


if __name__ == "__main__":
    main()


STEPS = (2, 5, 4)
SHAPES = {
    "q": (2, 5, 2, 3),
    "k": (2, 5, 2, 3),
    "erase": (2, 5, 2, 3),
    "v": (*STEPS, 6),
    "beta": STEPS,
    "log_gate": STEPS,
}
SHAPES |= {"log_key_decay": (*STEPS, 3), "log_value_decay": (*STEPS, 6), "initial_state": (2, 4, 3, 6)}


@on_cpu
@pytest.mark.parametrize("name", [name for name in SHAPES if name not in ("k", "v")])
@pytest.mark.parametrize("change", [lambda x: (x[0] + 1, *x[1:]), lambda x: x[:-1], lambda x: (*x[:-1], x[-1] - 1)])
def test_operators_that_are_called_directly_read_no_tensor_beyond_its_end(name, change):
    x = {key: torch.zeros(SHAPES[key]) for key in ("q", "k", "v")} | {name: torch.zeros(change(SHAPES[name]))}
    rule = [x["q"], x["k"], x["v"], x.get("erase"), name in ("erase", "beta"), x.get("beta"), x.get("log_gate"), False]
    rule += [x.get("log_key_decay"), x.get("log_value_decay"), None]
    with pytest.raises(RuntimeError, match=rf"{name} has shape .*; it must be"):
        torch.ops.fairseq_fastweights.rule_forward(*rule, x.get("initial_state"), 0)
    if name == "initial_state":
        rule[:3] = (each[:, :1] for each in rule[:3])
        with pytest.raises(RuntimeError, match=r"state has shape .*; it must be"):
            torch.ops.fairseq_fastweights.rule_step_(*rule, x["initial_state"])


SCAN = {"u": (2, 5, 6), "delta": (2, 5, 6), "A": (6, 3), "B": (2, 5, 3), "C": (2, 5, 3), "D": (6,)}
SCAN["initial_state"] = (2, *SCAN["A"])


@on_cpu
@pytest.mark.parametrize("name", SCAN)
@pytest.mark.parametrize("change", [lambda x: x[:-1], lambda x: x[..., :-1]])
def test_nor_does_a_scan(name, change):
    x = {key: torch.zeros(shape) for key, shape in SCAN.items()}
    x[name] = change(x[name])
    step = [each[:, :1] if key in ("u", "delta", "B", "C") else each for key, each in x.items()]
    operators = torch.ops.fairseq_fastweights
    for call in (
        lambda: operators.selective_scan_forward(*x.values(), 0),
        lambda: operators.selective_scan_step_(*step),
    ):
        with pytest.raises(RuntimeError, match=r"(delta|A|B|C|D|state) has shape .*; it must be"):
            call()
    if name == "initial_state":
        with pytest.raises(RuntimeError, match="state is of type Half; it must be Float"):
            operators.selective_scan_forward(*[*x.values()][:-1], torch.zeros(SCAN[name]).half(), 0)


class Called(TorchDispatchMode):
    """The names of the operators that are called meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.names.append(str(function))
        return function(*arguments, **(named or {}))


@on_cpu
def test_one_step_in_place_copies_no_state():
    for rule in (rule for rule in RULES if rule.name in ("sum", "gated delta")):
        inputs = rule.inputs(T=1, requires_grad=False)
        with torch.no_grad(), Called() as called:
            rule.run(inputs, "native", in_place=True)
        assert called.names == ["fairseq_fastweights.rule_step_.default"]
