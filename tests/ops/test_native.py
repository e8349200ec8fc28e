"""The compiled kernels as torch operators, and what only they promise. What every backend does is in test_backends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from fairseq_fastweights import ops
from fairseq_fastweights.ops import libraries, native
from tests.ops.rules import (
    CPU_KERNELS,
    DEVICE,
    RULE,
    RULES,
    RULES_AND_REGIMES,
    Inputs,
    Rule,
    assert_agrees,
    assert_close,
    cotangents,
    differentiate,
    in_float64,
    label,
)

ROOT = Path(__file__).resolve().parents[2]
PRINCIPAL = [RULE[name] for name in ("sum", "gated", "decay", "delta")]
OPERATORS = torch.ops.fairseq_fastweights
on_cpu = pytest.mark.skipif(DEVICE.type != "cpu", reason=CPU_KERNELS)


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Operators that are called by their names, and not through a rule, do not load the kernels themselves."""
    assert libraries.load(DEVICE.type) is None


def outcome(rule: Rule, inputs: Inputs) -> dict[str, Tensor | None]:
    outputs = rule.run(inputs, "native")
    return dict(zip(("out", "final_state"), outputs, strict=True)) | differentiate(outputs, inputs, cotangents(outputs))


# Shapes and sizes

# The papers' (K, V), each with T that fills no chunk.
PAPERS = [(16, 16), (32, 32), (64, 64), (256, 64), (512, 64), (4, 64), (32, 128), (256, 512)]


@pytest.mark.parametrize(("K", "V"), PAPERS)
@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_the_papers_sizes(rule, K, V):
    inputs = rule.inputs(B=1, T=147, H=2, K=K, V=V)
    assert_agrees(rule, "native", inputs, 1e-5)


@pytest.mark.parametrize(("K", "V"), [(17, 18), (66, 65)])
@pytest.mark.parametrize("T", [*range(1, 35), 63, 64, 65, 79, 80, 81, 128, 129, 193])
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_every_way_to_fill_chunks_and_intervals(rule, T, K, V):
    """On a CPU the smaller state goes step by step, the larger by chunks."""
    inputs = rule.inputs(B=1, T=T, H=3, K=K, V=V, dtype=torch.float64)
    assert_agrees(rule, "native", inputs, 1e-11)


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize(("K", "V"), [(4, 16), (8, 32), (12, 16), (16, 16), (20, 48), (32, 24), (48, 16)])
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_steps_that_are_read_where_they_lie(rule, K, V, aligned):
    """On a CPU steps of small states are not copied where they are whole vectors and tiles cover keys exactly."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-11)):
        inputs = rule.inputs(B=2, T=70, H=3, K=K, V=V, dtype=dtype, requires_grad=False)
        for name, x in inputs.items():
            if not aligned and x is not None and x.dim() == 4:
                wider = x.new_full((*x.shape[:3], x.shape[3] + 3), torch.nan)
                inputs[name] = wider[..., 1:-2].copy_(x)
        inputs = {name: None if x is None else x.requires_grad_() for name, x in inputs.items()}
        assert_agrees(rule, "native", inputs, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("size", [*range(1, 36), 47, 48, 49, 63, 65, 100, 127, 129, 255, 257, 511, 512])
@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_every_size_of_keys_and_values(rule, size):
    for K, V in ((size, 5), (3, size)):
        assert_agrees(rule, "native", rule.inputs(B=1, T=37, H=1, K=K, V=V), 1e-5)


@pytest.mark.parametrize(("rule", "regime"), RULES_AND_REGIMES, ids=label)
def test_large_states_and_few_keys_in_every_regime(rule, regime):
    """They take other ways than the states in the tests of all backends: decays if large, and few keys of any rule."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-11)):
        for K, V in ((65, 70), (3, 70)):
            assert_agrees(rule, "native", rule.inputs(B=1, T=37, K=K, V=V, dtype=dtype, regime=regime), tolerance)


@pytest.mark.parametrize("K", [3, 8])
def test_gates_of_every_magnitude(K):
    """A row of the batch for each, 1 - g from 1e-30 to 1: what is written is exact however little it is."""
    rule, magnitudes = RULE["gated"], 10.0 ** torch.arange(-30, 2)
    inputs = rule.inputs(B=len(magnitudes), T=33, H=1, K=K, V=5, initial_state=False)
    logs = -magnitudes[:, None, None] * torch.linspace(0.5, 1, 33)[None, :, None]
    inputs["log_gate"] = logs.to(DEVICE).requires_grad_()
    outcomes = []
    for values, backend in ((inputs, "native"), (in_float64(inputs), "reference")):
        outputs = rule.run(values, backend)
        gradients = differentiate(outputs, values, (torch.ones_like(outputs[0]), None))
        outcomes.append([x.cpu() for x in (outputs[0], *gradients.values())])
    for actual, wanted in zip(*outcomes, strict=True):
        error = (actual - wanted).abs().flatten(1).amax(1) / wanted.abs().flatten(1).amax(1)
        assert error.max() < 5e-6, error


@pytest.mark.parametrize("V", [512, 1024])
@pytest.mark.parametrize("K", [4, 20])
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_rows_of_whole_kibibytes(rule, K, V):
    """On a CPU a state's rows of 2 KiB and its multiples are spread in memory: in double from 256 columns on."""
    assert_agrees(rule, "native", rule.inputs(B=1, T=37, H=1, K=K, V=V), 1e-5)
    assert_agrees(rule, "native", rule.inputs(B=1, T=37, H=1, K=K, V=V // 2, dtype=torch.float64), 1e-11)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_heads_are_taken_together_and_stay_apart(rule, heads):
    """As many at a time as fit into a cache; here 64 KiB of state each, so that there are groups."""
    assert_agrees(rule, "native", rule.inputs(B=2, T=33, H=heads, K=128, V=128), 1e-5)


@pytest.mark.parametrize("complement", [True, False])
def test_one_decay_for_all_keys_is_the_same_without_a_copy(complement):
    """Retention: a decay per head, expanded. It runs as the gate that it is."""
    inputs = RULE["decay of keys"].inputs(T=70, K=6, requires_grad=False)
    one = inputs["log_key_decay"][..., :1]
    outputs = ops.decay_rule(**inputs | {"log_key_decay": one.expand_as(inputs["k"])}, backend="native")
    expected = ops.decay_rule(**inputs | {"log_key_decay": one.repeat(1, 1, 1, 6)}, backend="native")
    for actual, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(actual, wanted)
    assert native._shared_or_separate(one.expand_as(inputs["k"]), None)[0] is not None
    # A gradient is asked for by key: no single gate has it.
    decays = one.expand_as(inputs["k"]).requires_grad_()
    assert native._shared_or_separate(decays, None)[0] is None


def assert_rows_stay_apart(rule: Rule, K: int, V: int) -> None:
    """One number of a row of the batch that is infinite or NaN, in whichever input, changes no bit of the others."""
    drawn = rule.inputs(B=3, T=37, H=1, K=K, V=V)
    weights = dict(zip(("d_out", "d_final_state"), cotangents(rule.run(drawn, "native")), strict=True))
    given = {name: x.detach() for name, x in (drawn | weights).items() if x is not None}

    def other_rows(changed: dict[str, Tensor]) -> dict[str, Tensor]:
        values = given | changed
        inputs = {name: values[name].requires_grad_() if name in values else None for name in drawn}
        outputs = rule.run(inputs, "native")
        results = dict(zip(("out", "final_state"), outputs, strict=True))
        results |= differentiate(outputs, inputs, (values["d_out"], values["d_final_state"]))
        return {name: x[1:] for name, x in results.items()}

    expected = other_rows({})
    for name, x in given.items():
        for value in (torch.inf, torch.nan):
            changed = x.detach().clone()
            changed[0].view(-1)[changed[0].numel() // 2] = value
            for result, rows in other_rows({name: changed}).items():
                assert torch.equal(rows, expected[result]), f"{result}, where {name} has {value}"


# States that go step by step, in few rows or more, and products of matrices backwards, then in both directions. One of
# these numbers of keys fills a tile.
@pytest.mark.parametrize(("K", "V"), [(1, 5), (3, 5), (7, 5), (16, 16), (33, 35), (65, 66)])
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_what_is_not_finite_stays_in_its_row(rule, K, V):
    with threads(1):  # on a CPU all rows then take the same scratch memory
        assert_rows_stay_apart(rule, K, V)


# torch.library


def arguments_of(rule: Rule, inputs: Inputs) -> tuple[str, tuple]:
    """The forward operator that a rule runs, and its arguments."""
    q, k, v, state = (inputs[name] for name in ("q", "k", "v", "initial_state"))
    if rule.operation == "delta_rule":
        return "delta", (q, k, v, inputs["beta"], state)
    gates = [inputs.get(name) for name in ("log_key_decay", "log_value_decay")]
    return "diagonal", (q, k, v, inputs.get("log_gate"), rule.operation == "gated_rule", *gates, state)


@pytest.mark.parametrize("initial_state", [True, False], ids=["state", "no-state"])
@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_operators_pass_torchs_own_checks(rule, T, initial_state):
    """Schemas, shapes without data, registration with autograd, and compilation with dynamic shapes."""
    inputs = rule.inputs(B=2, T=T, H=2, K=5, V=3, initial_state=initial_state)
    kind, arguments = arguments_of(rule, inputs)
    forward = getattr(OPERATORS, f"{kind}_forward").default
    torch.library.opcheck(forward, (*arguments, 64))
    with torch.no_grad():
        torch.library.opcheck(forward, (*arguments, 0))
        out, final_state, states = forward(*arguments, 64)
        plain = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
        backward = getattr(OPERATORS, f"{kind}_backward").default
        torch.library.opcheck(backward, (out, final_state, *plain, states, 64))
        torch.library.opcheck(backward, (out, None, *plain, states, 64))
        if T == 1 and initial_state:
            torch.library.opcheck(getattr(OPERATORS, f"{kind}_step_").default, (*plain[:-1], plain[-1].clone()))


def test_the_cuda_kernels_tell_how_they_divide_the_work() -> None:
    def plan() -> dict[str, int] | None:
        return native.cuda_plan("delta_forward", (8, 1024, 8, 64, 64, 128), torch.bfloat16, (9, 0))

    if DEVICE.type == "cpu":
        with pytest.raises(ops.BackendUnavailable, match="CUDA"):
            plan()
        return
    found = plan()
    assert found is not None and found["chunk"] in (16, 32) and found["columns"] * found["blocks"] == 64
    with pytest.raises(RuntimeError, match="operation is delta; it must be one of diagonal_forward"):
        native.cuda_plan("delta", (8, 1024, 8, 64, 64, 128), torch.bfloat16, (9, 0))
    with pytest.raises(RuntimeError, match="key_dim and value_dim from 1 to 512"):
        native.cuda_plan("delta_forward", (8, 1024, 8, 1000, 64, 128), torch.bfloat16, (9, 0))


LOAD_BOTH = """
import torch
from fairseq_fastweights.ops import libraries, native
for part in libraries.PARTS:
    torch.ops.load_library(str(libraries.library(part)))
for rule in ("diagonal", "delta"):
    for operation in ("forward", "backward", "step_"):
        for device in ("CPU", "CUDA"):
            name = f"fairseq_fastweights::{rule}_{operation}"
            assert torch._C._dispatch_has_kernel_for_dispatch_key(name, device), (name, device)
"""


@pytest.mark.skipif(
    any(libraries.why_not(part, str(torch.__version__)) is not None for part in libraries.PARTS),
    reason="needs both libraries, which tools/native_build.py makes where torch has CUDA and nvcc is there",
)
def test_both_libraries_are_loaded_side_by_side():
    """They register the same operators, whose C++ signatures must not differ. No GPU is needed for it."""
    result = subprocess.run([sys.executable, "-c", LOAD_BOTH], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("layout", ["as it is", "time first", "wide"])
@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_shapes_without_data_are_those_with_it(rule, layout):
    """Strides too: out comes as v does, so that fairseq's (time, batch, channel) needs no copy."""
    inputs = rule.inputs(T=20)

    def lay(x: Tensor) -> Tensor:
        if layout == "time first":
            return x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
        if layout == "wide":
            return torch.cat([x.detach(), x.detach()], -1)[..., : x.shape[-1]].requires_grad_()
        return x

    inputs |= {name: lay(inputs[name]) for name in ("q", "k", "v")}
    kind, arguments = arguments_of(rule, inputs)
    real = getattr(OPERATORS, f"{kind}_forward")(*arguments, 64)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = getattr(OPERATORS, f"{kind}_forward")(*arguments, 64)
    for x, y in zip(real, fake, strict=True):
        assert (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)
    if layout == "time first":
        out = real[0]
        assert out.transpose(0, 1).is_contiguous()


@pytest.mark.parametrize("dim", range(3))
@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_overlapping_windows(rule, dim):
    """Where two dimensions have a stride of 1, `torch.empty_like` puts the longer one first, which may be the last."""

    def lay(x: Tensor) -> Tensor:
        rows = x.detach().movedim(dim, 0)
        signal = torch.cat([rows[0], rows[1:, ..., -1].movedim(0, -1)], -1)
        return signal.unfold(-1, x.shape[-1], 1).movedim(-2, 0).movedim(0, dim).requires_grad_()

    for B, T, H in ((2, 3, 4), (1, 3, 4), (2, 1, 4), (2, 3, 1)):
        inputs = rule.inputs(B=B, T=T, H=H, K=6, V=7)
        inputs |= {name: lay(x) for name, x in inputs.items() if x is not None and x.shape[-1] in (6, 7)}
        assert inputs["v"].stride(dim) == inputs["v"].stride(-1) == 1
        assert_agrees(rule, "native", inputs, 1e-5)
        with torch.no_grad():
            rule.run(inputs, "native")
        # What they hand to the operators has the strides without data that it has with it.
        kind, arguments = arguments_of(rule, {name: native._last_contiguous(x) for name, x in inputs.items()})
        plain = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
        forward, backward = (getattr(OPERATORS, f"{kind}_{name}").default for name in ("forward", "backward"))
        out, final_state, states = forward(*plain, 64)
        torch.library.opcheck(forward, (*plain, 64), test_utils="test_faketensor")
        torch.library.opcheck(backward, (out, final_state, *plain, states, 64), test_utils="test_faketensor")


@pytest.mark.parametrize("shape", [(20, 2, 3, 4), (1, 2, 3, 4), (20, 1, 3, 4), (20, 2, 1, 4), (1, 1, 1, 4)])
def test_views_of_fairseqs_tensors_are_not_copied(shape):
    """(time, batch, 3 x channel), cut into q, k and v; strides of dimensions of 1 may be anything."""
    joint = torch.randn(*shape[:2], 3 * shape[2] * shape[3], device=DEVICE)
    for x in joint.chunk(3, -1):
        view = x.view(shape).transpose(0, 1)
        assert native._last_contiguous(view) is view
        strides = [1 if n == 1 else step for n, step in zip(view.shape, view.stride(), strict=True)]
        odd = view.as_strided(view.shape, strides)
        assert native._last_contiguous(odd) is odd


class Layer(torch.nn.Module):
    """A rule between projections, with state in and out."""

    def __init__(self, rule: str) -> None:
        super().__init__()
        self.rule = rule
        self.project = torch.nn.Linear(12, 3 * 12 + 2)
        self.out = torch.nn.Linear(12, 12)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, gate = self.project(x).split([12, 12, 12, 2], -1)
        q, k, v = (y.view(*y.shape[:2], 2, 6) for y in (q, k, v))
        gate = torch.nn.functional.logsigmoid(gate.float())
        if self.rule == "decay":
            gates = [gate[..., None].expand(*k.shape), gate[..., None] * torch.ones_like(v)]
        else:
            gates = {"sum": [], "gated": [gate], "delta": [gate.exp()]}[self.rule]
        k = torch.nn.functional.normalize(k, dim=-1)
        y, state = getattr(ops, f"{self.rule}_rule")(q, k, v, *gates, initial_state=state, backend="native")
        return self.out(y.flatten(2)), state


def gradients(layer: torch.nn.Module, run, x: Tensor, state: Tensor) -> list[Tensor]:
    layer.zero_grad()
    x, state = x.clone().requires_grad_(), state.clone().requires_grad_()
    out, final_state = run(x, state)
    (out.float().square().sum() + final_state.square().sum()).backward()
    return [out, final_state, x.grad, state.grad, *[p.grad.clone() for p in layer.parameters()]]


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", ["sum", "gated", "decay", "delta"])
def test_torch_compile(name, autocast):
    """One graph, forward and backward, which stays right when shapes change; "aot_eager" needs no compiler."""
    torch.manual_seed(0)
    layer = Layer(name).to(DEVICE)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
        for B, T in ((2, 20), (2, 20), (3, 33), (1, 70)):
            x, state = torch.randn(B, T, 12, device=DEVICE), torch.randn(B, 2, 6, 6, device=DEVICE)
            for actual, expected in zip(
                gradients(layer, compiled, x, state), gradients(layer, layer, x, state), strict=True
            ):
                torch.testing.assert_close(actual, expected)
        with torch.no_grad():
            x, state = torch.randn(2, 1, 12, device=DEVICE), torch.randn(2, 2, 6, 6, device=DEVICE)
            for actual, expected in zip(compiled(x, state), layer(x, state), strict=True):
                torch.testing.assert_close(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_torch_compile_of_steps_in_place(rule):
    def run(inputs: Inputs, state: Tensor) -> Tensor:
        out, final_state = getattr(ops, rule.operation)(
            **inputs | {"initial_state": state}, backend="native", in_place=True
        )
        assert final_state is state
        return out

    torch.compiler.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            state = rule.inputs(T=1, requires_grad=False)["initial_state"].clone()
            expected_state = state.clone()
            for seed in range(3):
                inputs = rule.inputs(T=1, requires_grad=False, seed=seed)
                torch.testing.assert_close(compiled(inputs, state), run(inputs, expected_state))
                torch.testing.assert_close(state, expected_state)


@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_forward_mode_is_refused(rule, T):
    """Tangents are not dropped in silence, of whichever input; in generation neither."""
    inputs = rule.inputs(T=T, requires_grad=False)
    names = [name for name, x in inputs.items() if x is not None]
    for name in names:
        for in_place in (False, True):

            def run(x: Tensor, name: str = name, in_place: bool = in_place) -> Tensor:
                given = inputs | {"initial_state": inputs["initial_state"].clone()} | {name: x}
                return getattr(ops, rule.operation)(**given, backend="native", in_place=in_place)[0]

            with pytest.raises(NotImplementedError, match="carries a tangent.*use backend='reference'"):
                torch.func.jvp(run, (inputs[name],), (inputs[name],))
            with pytest.raises(NotImplementedError, match="carries a tangent"):
                torch.func.jacfwd(run)(inputs[name])
            with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="carries a tangent"):
                run(forward_ad.make_dual(inputs[name], inputs[name]))
            with forward_ad.dual_level():
                run(inputs[name].clone())  # there is no tangent


@pytest.mark.slow
def test_forward_mode_is_refused_in_a_compiled_function():
    rule = RULE["delta"]
    inputs = rule.inputs(T=5, requires_grad=False)

    def derivative(q: Tensor) -> Tensor:
        return torch.func.jvp(lambda x: rule.run(inputs | {"q": x}, "native")[0], (q,), (q,))[1]

    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="carries a tangent"):
        torch.compile(derivative, backend="aot_eager", fullgraph=True)(inputs["q"])


@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_no_gradient_is_no_gradient(rule):
    """Steps between kept states are kept for a backward pass only."""
    inputs = rule.inputs(T=200)
    kind, arguments = arguments_of(rule, inputs)
    assert getattr(OPERATORS, f"{kind}_forward")(*arguments, 64)[2].shape[2] == 3
    assert getattr(OPERATORS, f"{kind}_forward")(*arguments, 0)[2].shape[2] == 0
    with pytest.raises(RuntimeError, match="kept no states"):
        outputs = getattr(OPERATORS, f"{kind}_forward")(*arguments, 0)
        outputs[0].sum().backward()


@pytest.mark.parametrize("interval", [16, 32, 48, 64, 128, 512])
@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_how_many_states_are_kept_changes_no_bit(rule, interval, monkeypatch):
    if DEVICE.type != "cpu" and interval % 64:
        pytest.skip("on a GPU intervals are multiples of 64")
    inputs = rule.inputs(T=150, K=9, V=10)
    expected = outcome(rule, inputs)
    monkeypatch.setattr(native, "_interval", lambda *_: interval)
    for name, x in outcome(rule, inputs).items():
        assert torch.equal(x, expected[name]), name


# Threads and instruction sets


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@on_cpu
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_threads_change_no_bit(rule):
    inputs = rule.inputs(B=3, T=80, H=5, K=33, V=20)
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append(outcome(rule, inputs))
    for result in results[1:]:
        for name, x in result.items():
            assert torch.equal(x, results[0][name]), name


# The inputs that all value columns share: the blocks' gradients are added up.
SHARED = ("q", "k", "log_gate", "log_key_decay", "beta")


@on_cpu
@pytest.mark.parametrize("count", [3, 7])
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_heads_fewer_than_threads_are_divided_by_value_columns(rule, count):
    """Into blocks of 32 and 8, and of 16, 16 and 8 columns, which 2 heads of 3 or 7 threads have."""
    inputs = rule.inputs(B=1, T=130, H=2, K=64, V=40)
    with threads(1):
        whole = outcome(rule, inputs)
    with threads(count):
        assert_agrees(rule, "native", inputs, 1e-5)
        divided = outcome(rule, inputs)
        again = outcome(rule, inputs)
    for name, x in divided.items():
        assert torch.equal(x, again[name]), name
        # Sums over columns are rounded in another order; so they show that there were blocks.
        assert torch.equal(x, whole[name]) != (name in SHARED), name


@on_cpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=label)
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_divided_heads_in_every_dtype(rule, dtype):
    """Parts are added up in the dtype of the state and rounded once."""
    tolerance = 1e-11 if dtype == torch.float64 else 2e-2
    with threads(4):
        inputs = rule.inputs(B=1, T=257, H=1, K=17, V=64, dtype=dtype)
        assert_agrees(rule, "native", inputs, tolerance)
        time_first = {name: inputs[name].detach().transpose(0, 1).contiguous().transpose(0, 1) for name in ("q", "v")}
        laid = inputs | {name: x.requires_grad_() for name, x in time_first.items()}
        for name, x in outcome(rule, laid).items():
            assert torch.equal(x, outcome(rule, inputs)[name]), name


def variants() -> list[str]:
    """The instruction sets that this processor has kernels for."""
    known = ["baseline", "avx2", "avx512"]
    if DEVICE.type != "cpu" or libraries.load("cpu") is not None:
        return []
    environment = os.environ | {"FASTWEIGHTS_CPU_ISA": ""}
    code = "from fairseq_fastweights.ops import native; print(native.cpu_instruction_set())"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return known[: known.index(result.stdout.strip()) + 1]


@on_cpu
def test_the_instruction_set_is_one_that_there_is():
    assert native.cpu_instruction_set() in variants()


@on_cpu
@pytest.mark.slow
def test_every_instruction_set_agrees():
    """Each in a process of its own, over all rules and regimes."""
    for name in variants():
        result = subprocess.run(
            [sys.executable, "-m", "tests.ops.test_native"],
            cwd=ROOT,
            env=os.environ | {"FASTWEIGHTS_CPU_ISA": name, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip() == f"{name}: all agree"


@on_cpu
def test_an_instruction_set_that_is_not_there_is_named():
    result = subprocess.run(
        [sys.executable, "-c", "from fairseq_fastweights.ops import native; native.cpu_instruction_set()"],
        cwd=ROOT,
        env=os.environ | {"FASTWEIGHTS_CPU_ISA": "mmx"},
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert "FASTWEIGHTS_CPU_ISA is mmx; here it may be one of baseline" in result.stderr


# The first call

FIRST_CALL = """
import time, torch
from fairseq_fastweights import ops
device = {device!r}
x = torch.randn(2, 64, 4, 16, device=device, requires_grad=True)
b = torch.rand(2, 64, 4, device=device)
x.square().sum().backward()  # torch's own first time

def call():
    start = time.perf_counter()
    out, _ = ops.delta_rule(x, torch.nn.functional.normalize(x, dim=-1), x, b, backend="native")
    out.sum().backward()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start

first, second = call(), call()
print(first - second)
"""


def test_the_first_call_costs_no_more_than_a_moment():
    """Nothing is compiled or tuned. The best of a few processes: others may be at work on the machine."""
    extra: list[float] = []
    while len(extra) < 6 and (not extra or min(extra) > 0.05):
        begun = time.monotonic()
        result = subprocess.run(
            [sys.executable, "-c", FIRST_CALL.format(device=DEVICE.type)], cwd=ROOT, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        extra.append(float(result.stdout))
        assert time.monotonic() - begun < 300
    assert min(extra) <= 0.05


def main() -> None:
    """What `test_every_instruction_set_agrees` runs: all rules and regimes, with what the environment names."""
    for rule, regime in RULES_AND_REGIMES:
        for T, K, V in ((3, 5, 3), (100, 16, 16), (70, 33, 50), (33, 65, 70), (33, 4, 20)):
            for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-11)):
                assert_agrees(rule, "native", rule.inputs(T=T, K=K, V=V, dtype=dtype, regime=regime), tolerance)
    for rule in RULES:
        for dtype in (torch.bfloat16, torch.float16):
            assert_agrees(rule, "native", rule.inputs(T=70, K=20, V=33, dtype=dtype), 2e-2)
        inputs = rule.inputs(T=1, K=20, V=33, requires_grad=False)
        step = dict(zip(("out", "final_state"), rule.run(inputs, "native"), strict=True))
        whole = dict(zip(("out", "final_state"), rule.reference(inputs), strict=True))
        assert_close(step, whole, 1e-6)
        for K, V in ((3, 5), (7, 5), (33, 35)):
            assert_rows_stay_apart(rule, K, V)
    print(f"{native.cpu_instruction_set()}: all agree")


if __name__ == "__main__":
    main()
