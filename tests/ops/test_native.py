"""The compiled kernels as torch operators, and what only they promise. What every backend does is in test_backends.

How threads and instruction sets divide the work of the CPU kernels is in test_native_cpu.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from fairseq_fastweights import ops
from fairseq_fastweights.ops import libraries, native
from tests.ops.rules import (
    DEVICE,
    PRINCIPAL,
    RULE,
    RULES,
    Inputs,
    Rule,
    assert_agrees,
    assert_close,
    assert_same,
    cotangents,
    deal,
    differentiate,
    in_float64,
    label,
    outcome,
)

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = torch.ops.fairseq_fastweights


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Operators that are called by their names, and not through a rule, do not load the kernels themselves."""
    assert libraries.load(DEVICE.type) is None


# Shapes and sizes. A CPU's kernels take a chunk of 16 steps at a time, and keep a state every 64. States are rows of
# keys, columns of values; vectors have 16 columns of float32 (AVX-512) down to 2 of float64, tiles 16 rows or 8.

SIZES = [
    # Up to 4 keys, in one vector of columns or in several at once.
    *[(1, 1), (2, 9), (3, 25), (4, 16), (4, 49), (1, 33), (3, 65), (2, 80), (4, 64), (4, 512)],
    # Rows of every part of a tile, either side of it; columns that are read where they lie, and others.
    *[(5, 4), (5, 13), (8, 8), (8, 32), (9, 5), (12, 16), (13, 3), (16, 16), (16, 29), (17, 2), (20, 48), (20, 24)],
    *[(21, 17), (24, 1), (25, 32), (28, 9), (29, 28), (32, 33), (32, 64), (33, 21), (48, 16), (47, 48), (64, 64)],
    # So large that whole chunks are multiplied: for sums, one gate for all, decays of one side, and of both.
    *[(65, 64), (33, 63), (65, 66), (64, 129), (65, 130), (109, 80), (132, 64), (61, 144), (96, 97), (256, 64)],
    # Long and narrow. Rows of 2 KiB and its multiples are spread in memory.
    *[(100, 3), (5, 129), (129, 16), (20, 512), (3, 257), (257, 5), (511, 2), (512, 64)],
]
CALLS = [
    {"T": 17, "dtype": torch.float32, "initial_state": True, "apart": False},
    {"T": 18, "dtype": torch.float64, "initial_state": True, "apart": True},
    {"T": 19, "dtype": torch.float32, "initial_state": False, "apart": True},
    {"T": 20, "dtype": torch.float64, "initial_state": True, "apart": False},
    {"T": 22, "dtype": torch.float32, "initial_state": True, "apart": True},
    {"T": 27, "dtype": torch.float64, "initial_state": False, "apart": False},
    {"T": 30, "dtype": torch.float32, "initial_state": True, "apart": False},
]


def apart(x: Tensor) -> Tensor:
    """Rows that no vector is aligned with, and NaN around each."""
    wider = x.new_full((*x.shape[:3], x.shape[3] + 3), torch.nan)
    return wider[..., 1:-2].copy_(x.detach()).requires_grad_()


@pytest.mark.parametrize(("rule", "size", "call"), deal(RULES, SIZES, CALLS), ids=label)
def test_the_papers_sizes_and_those_around_vectors_and_tiles(rule, size, call):
    (K, V), (T, dtype, initial_state, rows_apart) = size, call.values()
    # Two groups of heads that go through time together, unless the reference would take long.
    B, H = (2, 3) if K * V < 1 << 13 else (1, 2)
    inputs = rule.inputs(B=B, T=T, H=H, K=K, V=V, dtype=dtype, initial_state=initial_state)
    if rows_apart:
        inputs |= {name: apart(x) for name, x in inputs.items() if x is not None and x.dim() == 4}
    assert_agrees(rule, "native", inputs)


# Step by step with few keys and in tiles, by chunks, and what is either, or one of them in one direction.
WAYS = [(3, 20, torch.float32), (7, 12, torch.float64), (65, 130, torch.float64), (17, 18, torch.float64)]
SHORT = list(itertools.product(RULES, range(1, 17), WAYS))
LONG = deal(RULES, [32, 63, 64, 65, 80, 81, 128, 129, 147], [*WAYS, (16, 32, torch.float32)])


@pytest.mark.parametrize(("rule", "T", "way"), SHORT + LONG, ids=label)
def test_every_way_to_fill_chunks_and_intervals(rule, T, way):
    K, V, dtype = way
    assert_agrees(rule, "native", rule.inputs(B=1, T=T, H=2, K=K, V=V, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=label)
@pytest.mark.parametrize(("K", "V"), [(65, 130), (3, 70)])
@pytest.mark.parametrize("rule", [rule for rule in RULES if len(rule.regimes) > 1], ids=label)
def test_large_states_and_few_keys_in_every_regime(rule, K, V, dtype):
    """They take other ways than the states in the tests of all backends: large ones, and few keys of any rule."""
    inputs = rule.in_regimes(rule.regimes, B=1, T=37, K=K, V=V, dtype=dtype)
    assert_agrees(rule, "native", inputs, rows=rule.regimes)


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


def test_one_decay_for_all_keys_is_the_same_without_a_copy():
    """Retention: a decay per head, expanded. It runs as the gate that it is."""
    inputs = RULE["decay of keys"].inputs(T=70, K=6, requires_grad=False)
    one = inputs["log_key_decay"][..., :1]
    outputs = ops.decay_rule(**inputs | {"log_key_decay": one.expand_as(inputs["k"])}, backend="native")
    expected = ops.decay_rule(**inputs | {"log_key_decay": one.repeat(1, 1, 1, 6)}, backend="native")
    for actual, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(actual, wanted)
    assert native.DECAY.arguments(one.expand_as(inputs["k"]), None).log_gate is not None
    # A gradient is asked for by key: no single gate has it.
    decays = one.expand_as(inputs["k"]).requires_grad_()
    assert native.DECAY.arguments(decays, None).log_gate is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=label)
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_a_step(rule, dtype):
    """Of a state of its own, which no gradient is asked for."""
    for B, K, V in ((3, 5, 3), (1, 20, 33)):
        inputs = rule.inputs(B=B, T=1, K=K, V=V, dtype=dtype, requires_grad=False)
        expected = dict(zip(("out", "final_state"), rule.reference(in_float64(inputs)), strict=True))
        tolerance = {torch.float32: 1e-6, torch.float64: 1e-14}.get(dtype, 5e-3)
        assert_close(dict(zip(expected, rule.run(inputs, "native"), strict=True)), expected, tolerance)


# torch.library


def arguments_of(rule: Rule, inputs: Inputs) -> tuple:
    """What a rule hands to its operators, but for the interval."""
    given = dict(inputs)
    q, k, v, state = (given.pop(name) for name in ("q", "k", "v", "initial_state"))
    arguments = ops.OPERATIONS[rule.operation_name].kernel.arguments(*given.values())
    return q, k, v, *arguments, None, state


def check_operators(rule: Rule, T: int, initial_state: bool, utils: list[str]) -> None:
    arguments = arguments_of(rule, rule.inputs(B=2, T=T, H=2, K=5, V=3, initial_state=initial_state))
    forward, backward, step = (getattr(OPERATORS, f"rule_{x}").default for x in ("forward", "backward", "step_"))
    torch.library.opcheck(forward, (*arguments, 64), test_utils=utils)
    with torch.no_grad():
        torch.library.opcheck(forward, (*arguments, 0), test_utils=utils)
        out, final_state, states = forward(*arguments, 64)
        plain = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
        for d_final_state in (final_state, None):
            torch.library.opcheck(backward, (out, d_final_state, *plain, states, 64), test_utils=utils)
        if T == 1 and initial_state:
            torch.library.opcheck(step, (*plain[:-1], plain[-1].clone()), test_utils=utils)


@pytest.mark.parametrize("initial_state", [True, False], ids=["state", "no-state"])
@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_operators_pass_torchs_own_checks(rule, T, initial_state):
    """Schemas, registration with autograd, and shapes without data."""
    check_operators(rule, T, initial_state, ["test_schema", "test_autograd_registration", "test_faketensor"])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "T"), [("gated", 70), ("decay", 1), ("delta", 1)])
def test_operators_compile_with_dynamic_shapes(name, T):
    check_operators(RULE[name], T, True, ["test_aot_dispatch_dynamic"])


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
for operation in ("forward", "backward", "step_"):
    for device in ("CPU", "CUDA"):
        name = f"fairseq_fastweights::rule_{operation}"
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
    lay = {
        "as it is": lambda x: x,
        "time first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        "wide": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    }[layout]
    inputs = rule.inputs(T=20, requires_grad=False)
    arguments = arguments_of(rule, inputs | {name: lay(inputs[name]) for name in ("q", "k", "v")})
    real = OPERATORS.rule_forward(*arguments, 64)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = OPERATORS.rule_forward(*arguments, 64)
    for x, y in zip(real, fake, strict=True):
        assert (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)
    assert layout != "time first" or real[0].transpose(0, 1).is_contiguous()


@pytest.mark.parametrize("dim", range(3))
@pytest.mark.parametrize("name", ["decay", "delta"])
def test_overlapping_windows(name, dim):
    """Where two dimensions have a stride of 1, `torch.empty_like` puts the longer one first, which may be the last."""

    def lay(x: Tensor) -> Tensor:
        rows = x.detach().movedim(dim, 0)
        signal = torch.cat([rows[0], rows[1:, ..., -1].movedim(0, -1)], -1)
        return signal.unfold(-1, x.shape[-1], 1).movedim(-2, 0).movedim(0, dim).requires_grad_()

    rule = RULE[name]
    for B, T, H in ((2, 3, 4), (1, 3, 4), (2, 1, 4), (2, 3, 1)):
        inputs = rule.inputs(B=B, T=T, H=H, K=6, V=7)
        inputs |= {name: lay(x) for name, x in inputs.items() if x is not None and x.shape[-1] in (6, 7)}
        assert inputs["v"].stride(dim) == inputs["v"].stride(-1) == 1
        assert_agrees(rule, "native", inputs)
        with torch.no_grad():
            rule.run(inputs, "native")
        # What they hand to the operators has the strides without data that it has with it.
        arguments = arguments_of(rule, {name: native._last_contiguous(x) for name, x in inputs.items()})
        plain = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
        forward, backward = OPERATORS.rule_forward.default, OPERATORS.rule_backward.default
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


def test_which_states_a_step_changes_where_they_lie():
    state = torch.zeros(2, 3, 4, 5)
    assert native.can_change(state) and native.can_change(state[..., 1:3]) and native.can_change(state[..., ::5])
    assert not native.can_change(state.transpose(2, 3)) and not native.can_change(state[..., ::2])


# Dimensions that are divided (test_divided), where `largest` says so, are compiled likewise.
COMPILED = [("decay", True, None), ("delta", False, None), ("gated", False, 16), ("delta", True, 16)]


@pytest.fixture
def compiled_case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Rule, bool, dict[str, int]]:
    name, autocast, largest = request.param
    if largest is not None:
        monkeypatch.setitem(native.LARGEST_DIM, DEVICE.type, largest)
    torch.compiler.reset()
    K = 6 if largest is None else 13 if name == "delta" else 37
    return RULE[name], autocast, {"K": K, "V": 5 if largest is None else 20}


@pytest.mark.slow
@pytest.mark.parametrize("compiled_case", COMPILED, ids=label, indirect=True)
def test_torch_compile(compiled_case):
    """One graph, forward and backward, which stays right when shapes change; "aot_eager" needs no compiler."""
    rule, autocast, sizes = compiled_case
    names = list(rule.inputs())
    compiled = torch.compile(
        lambda *x: rule.run(dict(zip(names, x, strict=True)), "native"), backend="aot_eager", fullgraph=True
    )
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
        for B, T in ((2, 20), (2, 20), (3, 33), (1, 70)):
            inputs = rule.inputs(B=B, T=T, **sizes)
            outputs = compiled(*inputs.values())
            actual = dict(zip(("out", "final_state"), outputs, strict=True))
            grads = differentiate(outputs, inputs, cotangents(outputs))
            actual |= {f"gradient of {name}": grad for name, grad in grads.items()}
            assert_close(actual, outcome(rule, "native", inputs), 1e-6)
        with torch.no_grad():
            inputs = rule.inputs(T=1, **sizes)
            for x, y in zip(compiled(*inputs.values()), rule.run(inputs, "native"), strict=True):
                torch.testing.assert_close(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("compiled_case", COMPILED[:3], ids=label, indirect=True)
def test_torch_compile_of_steps_in_place(compiled_case):
    rule, _, sizes = compiled_case

    def run(inputs: Inputs, state: Tensor) -> Tensor:
        out, final_state = rule.run(inputs | {"initial_state": state}, "native", in_place=True)
        assert final_state is state
        return out

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            state = rule.inputs(T=1, **sizes, requires_grad=False)["initial_state"].clone()
            expected_state = state.clone()
            for seed in range(3):
                inputs = rule.inputs(T=1, **sizes, requires_grad=False, seed=seed)
                torch.testing.assert_close(compiled(inputs, state), run(inputs, expected_state))
                torch.testing.assert_close(state, expected_state)


@pytest.mark.parametrize(("rule", "T", "largest"), deal(RULES, [1, 5], [512, 16]), ids=label)
def test_forward_mode_is_refused(rule, T, largest, monkeypatch):
    """Tangents are not dropped in silence, of whichever input; in generation, and of divided dimensions, neither."""
    monkeypatch.setitem(native.LARGEST_DIM, DEVICE.type, largest)
    inputs = rule.inputs(T=T, V=17, requires_grad=False)

    def run(x: Tensor, name: str = "initial_state", in_place: bool = False) -> Tensor:
        given = inputs | {"initial_state": inputs["initial_state"].clone()} | {name: x}
        return rule.run(given, "native", in_place=in_place)[0]

    for name, x in inputs.items():
        for in_place in (False, True) if x is not None else ():
            with pytest.raises(NotImplementedError, match=r"carries a tangent.*use backend='reference'"):
                torch.func.jvp(lambda x, name=name, in_place=in_place: run(x, name, in_place), (x,), (x,))
            with forward_ad.dual_level():
                run(x.clone(), name, in_place)  # there is no tangent
                with pytest.raises(NotImplementedError, match="carries a tangent"):
                    run(forward_ad.make_dual(x, x), name, in_place)
    with pytest.raises(NotImplementedError, match="carries a tangent"):
        torch.func.jacfwd(run)(inputs["initial_state"])


@pytest.mark.slow
def test_forward_mode_is_refused_in_a_compiled_function():
    rule = RULE["delta"]
    inputs = rule.inputs(T=5, requires_grad=False)

    def derivative(q: Tensor) -> Tensor:
        return torch.func.jvp(lambda x: rule.run(inputs | {"q": x}, "native")[0], (q,), (q,))[1]

    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="carries a tangent"):
        torch.compile(derivative, backend="aot_eager", fullgraph=True)(inputs["q"])


# States that are kept for the backward pass


@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_no_gradient_is_no_gradient(rule):
    """Steps between kept states are kept for a backward pass only."""
    inputs = rule.inputs(T=200)
    arguments, forward = arguments_of(rule, inputs), OPERATORS.rule_forward
    assert [forward(*arguments, interval)[2].shape[2] for interval in (64, 0)] == [3, 0]
    out, _, _ = forward(*arguments, 0)
    with pytest.raises(RuntimeError, match="kept no states"):
        out.sum().backward()


@pytest.mark.parametrize("interval", [16, 32, 48, 64, 128, 512])
@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_how_many_states_are_kept_changes_no_bit(rule, interval, monkeypatch):
    if DEVICE.type != "cpu" and interval % 64:
        pytest.skip("on a GPU intervals are multiples of 64")
    inputs = rule.inputs(T=150, K=9, V=10)
    expected = outcome(rule, "native", inputs)
    monkeypatch.setattr(native, "_interval", lambda *_: interval)
    assert_same(outcome(rule, "native", inputs), expected, f"with a state every {interval} steps")


# (K, V, dtype, interval): the fewest for which a state takes less than a quarter, either side of that.
INTERVALS = [(128, 127, torch.float32, 64), (128, 128, torch.float32, 128), (128, 128, torch.float64, 128)]
INTERVALS += [(64, 63, torch.bfloat16, 64), (64, 64, torch.bfloat16, 128), (512, 512, torch.float32, 256)]


@pytest.mark.parametrize(("K", "V", "dtype", "interval"), INTERVALS, ids=label)
def test_states_take_less_than_a_quarter_of_inputs_and_gradients(K, V, dtype, interval, monkeypatch):
    monkeypatch.setitem(native.INTERVALS, "cpu", (64, 128, 256))
    k, v = (torch.empty(1, 1, 1, n, dtype=dtype) for n in (K, V))
    assert native._interval(k, v) == interval
