"""The compiled kernels as torch operators, and promises of theirs alone. Threads: test_native_cpu."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from fairseq_fastweights import ops
from fairseq_fastweights.ops import backends, kernels, libraries
from fairseq_fastweights.ops.reference import Row
from tests.ops.agreement import TOLERANCE, assert_agrees, assert_close, assert_same
from tests.ops.results import cotangents, definition, differentiate, in_float64, named, outcome
from tests.ops.rules import DEVICE, LAYOUT, PRINCIPAL, RULE, RULES, Inputs, RuleCase, deal
from tests.ops.test_selective_scan import SCAN, SCANNED, laid

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = torch.ops.fairseq_fastweights


# A CPU's kernels take a chunk of 16 steps at a time, and keep a state every 64. States are rows of keys, columns of
# values; vectors have 16 columns of float32 (AVX-512) down to 2 of float64, tiles 16 rows or 8.
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
# T, the dtype, whether there is a state to start from, and whether rows are apart.
CALLS = [
    *[(17, torch.float32, True, False), (18, torch.float64, True, True), (19, torch.float32, False, True)],
    *[(20, torch.float64, True, False), (22, torch.float32, True, True), (27, torch.float64, False, False)],
    (30, torch.float32, True, False),
]
# The kernels run a decay of neither as they run sums. Corrections with decays have one way through a chunk.
OTHERS = [rule for rule in RULES if rule.name != "decay of neither"]
ONE_WAY = [RULE[name] for name in ("gated delta", "Kimi delta", "two gates")]
SIZED = [
    (rule, size, call)
    for rule, size, call in deal(OTHERS, SIZES, CALLS)
    if rule not in ONE_WAY or SIZES.index(size) % 3 == ONE_WAY.index(rule)
]


def apart(x: Tensor) -> Tensor:
    """Rows that no vector is aligned with, and NaN around each."""
    wider = x.new_full((*x.shape[:3], x.shape[3] + 3), torch.nan)
    return wider[..., 1:-2].copy_(x.detach()).requires_grad_()


@pytest.mark.parametrize(("rule", "size", "call"), SIZED)
def test_the_papers_sizes_and_those_around_vectors_and_tiles(rule, size, call):
    (K, V), (T, dtype, initial_state, rows_apart) = size, call
    # Two groups of heads that go through time together, unless the reference would take long.
    B, H = (2, 3) if K * V < 1 << 13 else (1, 2)
    inputs = rule.inputs(B=B, T=T, H=H, K=K, V=V, dtype=dtype, initial_state=initial_state)
    if rows_apart:
        inputs |= {name: apart(x) for name, x in inputs.items() if x is not None and x.dim() == 4}
    assert_agrees(rule, "native", inputs)


# Step by step with few keys and in tiles, by chunks, and both, one for each direction.
WAYS = [(3, 20, torch.float32), (7, 12, torch.float64), (65, 130, torch.float64), (17, 18, torch.float64)]
SHORT = [
    (rule, T, WAYS[(T + T // 4 + i + other) % 4])
    for (i, rule), T, other in itertools.product(enumerate(OTHERS), range(1, 17), (0, 1))
]
LONG = deal(OTHERS, [32, 63, 64, 65, 80, 81, 128, 129, 147], [*WAYS, (16, 32, torch.float32)])


@pytest.mark.parametrize(("rule", "T", "way"), SHORT + LONG)
def test_every_way_to_fill_chunks_and_intervals(rule, T, way):
    K, V, dtype = way
    assert_agrees(rule, "native", rule.inputs(B=1, T=T, H=2, K=K, V=V, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("K", "V"), [(65, 130), (3, 70)])
@pytest.mark.parametrize("rule", [rule for rule in RULES if len(rule.regimes) > 1])
def test_large_states_and_few_keys_in_every_regime(rule, K, V, dtype):
    """They take other ways than the states in the tests of all backends: large ones, and few keys of any rule."""
    inputs = rule.in_regimes(rule.regimes, B=1, T=37, K=K, V=V, dtype=dtype)
    assert_agrees(rule, "native", inputs, rows=rule.regimes)


@pytest.mark.parametrize("K", [3, 8])
def test_gates_of_every_magnitude(K):
    """A row of the batch for each, 1 - g from 1e-30 to 1: writes are exact, however small."""
    rule, magnitudes = RULE["gated"], 10.0 ** torch.arange(-30, 2)
    inputs = rule.inputs(B=len(magnitudes), T=33, H=1, K=K, V=5, initial_state=False)
    logs = -magnitudes[:, None, None] * torch.linspace(0.5, 1, 33)[None, :, None]
    inputs["log_gate"] = logs.to(DEVICE).requires_grad_()
    outputs = rule.run(inputs, "native")
    weights = torch.ones_like(outputs[0]), None
    expected = definition(rule, inputs, weights)
    found = named(outputs, differentiate(outputs, inputs, weights))
    for actual, wanted in ((found[name].cpu(), x) for name, x in expected.items() if name != "final_state"):
        error = (actual - wanted).abs().flatten(1).amax(1) / wanted.abs().flatten(1).amax(1)
        assert error.max() < 5e-6, error


def test_one_decay_for_all_keys_is_the_same_without_a_copy():
    """Retention: a decay per head, expanded. It runs as the gate that it is."""
    rule = RULE["decay of keys"]
    inputs = rule.inputs(T=70, K=6, requires_grad=False)
    one = inputs["log_key_decay"][..., :1]
    outputs = ops.decay_rule(**inputs | {"log_key_decay": one.expand_as(inputs["k"])}, backend="native")
    assert_close(named(outputs), definition(rule, inputs | {"log_key_decay": one.repeat(1, 1, 1, 6)}, None), 1e-6)
    # A gradient is asked for by key: no single gate has it.
    for is_gate, decay in ((True, one.expand_as(inputs["k"])), (False, one.expand_as(inputs["k"]).requires_grad_())):
        given = kernels.operator_arguments(*(inputs[name] for name in "qkv"), Row(log_key_decay=decay))
        log_gate, log_key_decay = given[6], given[8]
        assert (log_gate is not None, log_key_decay is None) == (is_gate, is_gate)


@pytest.mark.parametrize("rule", RULES)
def test_a_step(rule):
    """With a state of its own, which no gradient is asked for."""
    for (B, K, V), dtype in itertools.product(((3, 5, 3), (1, 20, 33)), TOLERANCE):
        inputs = rule.inputs(B=B, T=1, K=K, V=V, dtype=dtype, requires_grad=False)
        tolerance = {torch.float32: 1e-6, torch.float64: 1e-14}.get(dtype, 5e-3)
        assert_close(named(rule.run(inputs, "native")), named(rule.reference(in_float64(inputs))), tolerance)


def arguments_of(rule: RuleCase, inputs: Inputs) -> tuple:
    """The arguments that a rule hands to its operators, but for the interval."""
    if rule is SCAN:
        return tuple(inputs.values())
    given = dict(inputs)
    q, k, v, state = (given.pop(name) for name in ("q", "k", "v", "initial_state"))
    arguments = kernels.operator_arguments(q, k, v, ops.RULES[rule.operation_name].kernel.row(*given.values()))
    # Leaves: a rule without a correction has beta in its keys.
    return *(x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in arguments), state


def check_operators(rule: RuleCase, inputs: Inputs, utils: list[str]) -> None:
    arguments, name = arguments_of(rule, inputs), "selective_scan" if rule is SCAN else "rule"
    forward, backward, step = (getattr(OPERATORS, f"{name}_{x}").default for x in ("forward", "backward", "step_"))
    torch.library.opcheck(forward, (*arguments, 64), test_utils=utils)
    with torch.no_grad():
        torch.library.opcheck(forward, (*arguments, 0), test_utils=utils)
        out, final_state, states = forward(*arguments, 64)
        plain = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
        for d_final_state in (final_state, None):
            torch.library.opcheck(backward, (out, d_final_state, *plain, states, 64), test_utils=utils)
        if out.shape[1] == 1 and plain[-1] is not None:
            torch.library.opcheck(step, (*plain[:-1], plain[-1].clone()), test_utils=utils)


@pytest.mark.parametrize(("T", "initial_state"), [(1, True), (70, False)])
@pytest.mark.parametrize("rule", [*RULES, *SCANNED])
def test_operators_pass_torchs_own_checks(rule, T, initial_state):
    """Schemas, registration with autograd, and shapes without data; of the scan in time-first memory too."""
    utils = ["test_schema", "test_autograd_registration", "test_faketensor"]
    check_operators(rule, rule.inputs(T=T, initial_state=initial_state), utils)
    if rule is SCAN:
        half = rule.inputs(T=T, initial_state=initial_state, dtype=torch.bfloat16, extras_dtype=torch.float32)
        check_operators(rule, laid(half, 1), utils)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "T"), [(RULE["gated"], 70), (RULE["delta"], 1), *((x, 40) for x in SCANNED)])
def test_operators_compile_with_dynamic_shapes(rule, T):
    check_operators(rule, rule.inputs(T=T), ["test_aot_dispatch_dynamic"])


def test_the_cuda_kernels_tell_how_they_divide_the_work():
    asked = "delta_forward", (8, 1024, 8, 64, 64, 128), torch.bfloat16, (9, 0)
    if DEVICE.type == "cpu":
        with pytest.raises(ops.BackendUnavailable, match="CUDA"):
            kernels.cuda_plan(*asked)
        return
    found = kernels.cuda_plan(*asked)
    assert found is not None and found["columns"] * found["blocks"] == 64
    with pytest.raises(RuntimeError, match="operation is delta; it must be one of diagonal_forward"):
        kernels.cuda_plan("delta", *asked[1:])
    with pytest.raises(RuntimeError, match="key_dim and value_dim from 1 to 512"):
        kernels.cuda_plan(asked[0], (8, 1024, 8, 1000, 64, 128), *asked[2:])
    with pytest.raises(RuntimeError, match="separate_decays is 3; it must be 0, 1"):
        kernels.cuda_plan(*asked, separate_decays=3)


LOAD_BOTH = """
import torch
from fairseq_fastweights.ops import backends, kernels, libraries
for part in libraries.PARTS:
    torch.ops.load_library(str(libraries.library(part)))
for name in ("forward", "backward", "step_"):
    for device in ("CPU", "CUDA"):
        operator = f"fairseq_fastweights::rule_{name}"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(operator, device), (name, device)
"""


@pytest.mark.skipif(
    any(libraries.why_not(part, str(torch.__version__)) is not None for part in libraries.PARTS),
    reason="needs both libraries, which tools/native_build.py makes where torch has CUDA and nvcc is there",
)
def test_both_libraries_are_loaded_side_by_side():
    """They register the same operators, whose C++ signatures must not differ. No GPU is needed for it."""
    result = subprocess.run([sys.executable, "-c", LOAD_BOTH], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("layout", ["a slice", "as fairseq", "windows", "windows of time", "windows of heads"])
@pytest.mark.parametrize("name", ["decay", "delta"])
def test_shapes_without_data_are_those_with_it(name, layout):
    """Strides too, even where two dimensions have a stride of 1: out comes as v does, and fairseq need not copy it."""
    for B, T, H in ((2, 3, 4), (1, 3, 4), (2, 1, 4), (2, 3, 1)):
        inputs = RULE[name].inputs(B=B, T=T, H=H, K=6, V=7, requires_grad=False)
        laid = {n: kernels.last_contiguous(LAYOUT[layout](x)) for n, x in inputs.items() if x.shape[-1] in (6, 7)}
        arguments = arguments_of(RULE[name], inputs | laid)
        forward, backward = OPERATORS.rule_forward.default, OPERATORS.rule_backward.default
        out, final_state, states = forward(*arguments, 64)
        torch.library.opcheck(forward, (*arguments, 64), test_utils="test_faketensor")
        torch.library.opcheck(backward, (out, final_state, *arguments, states, 64), test_utils="test_faketensor")
        assert layout != "as fairseq" or out.transpose(0, 1).is_contiguous()


def test_views_of_fairseqs_tensors_are_not_copied():
    """(time, batch, 3 x channel), cut into q, k and v; strides of dimensions of 1 may be anything."""
    for shape in ((20, 2, 3, 4), (1, 2, 3, 4), (20, 1, 3, 4), (20, 2, 1, 4), (1, 1, 1, 4)):
        x = torch.randn(*shape[:2], 3 * shape[2] * shape[3], device=DEVICE).chunk(3, -1)[1]
        view = x.view(shape).transpose(0, 1)
        assert kernels.last_contiguous(view) is view
        strides = [1 if n == 1 else step for n, step in zip(view.shape, view.stride(), strict=True)]
        assert kernels.last_contiguous(odd := view.as_strided(view.shape, strides)) is odd


# Dimensions that are divided (test_divided), where `largest` says so, are compiled likewise.
COMPILED = [(RULE["decay"], True, 512, 6, 5), (RULE["gated"], False, 16, 20, 5), (RULE["delta"], True, 16, 13, 20)]
COMPILED += [(rule, False, 512, 6, 5) for rule in SCANNED]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "autocast", "largest", "K", "V"), COMPILED)
def test_torch_compile(rule, autocast, largest, K, V, monkeypatch):
    """One graph, forward and backward, which stays right when shapes change; "aot_eager" needs no compiler."""
    monkeypatch.setitem(backends.LARGEST_DIM, DEVICE.type, largest)
    torch.compiler.reset()
    sizes = {"K": K, "V": V}
    compiled = torch.compile(lambda inputs: rule.run(inputs, "native"), backend="aot_eager", fullgraph=True)
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
        for B, T in ((2, 20), (2, 20), (3, 33), (1, 70)):
            inputs = rule.inputs(B=B, T=T, **sizes)
            outputs = compiled(inputs)
            actual = named(outputs, differentiate(outputs, inputs, cotangents(outputs)))
            assert_close(actual, outcome(rule, "native", inputs), 1e-6)
        with torch.no_grad():
            inputs = rule.inputs(T=1, **sizes)
            assert_close(named(compiled(inputs)), named(rule.run(inputs, "native")), 1e-6)

    def run(inputs: Inputs, state: Tensor) -> Tensor:
        out, final_state = rule.run(inputs | {"initial_state": state}, "native", in_place=True)
        assert final_state is state
        return out

    in_place = torch.compile(run, backend="aot_eager", fullgraph=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            state = rule.inputs(T=1, **sizes, requires_grad=False)["initial_state"].clone()
            expected_state = state.clone()
            for seed in range(3):
                inputs = rule.inputs(T=1, **sizes, requires_grad=False, seed=seed)
                torch.testing.assert_close(in_place(inputs, state), run(inputs, expected_state))
                torch.testing.assert_close(state, expected_state)


@pytest.mark.parametrize(("rule", "T", "largest"), deal([*RULES, *SCANNED], [1, 5], [512, 16]))
def test_forward_mode_is_refused(rule, T, largest, monkeypatch):
    """Tangents are not dropped in silence, of whichever input; in generation, and of divided dimensions, neither."""
    monkeypatch.setitem(backends.LARGEST_DIM, DEVICE.type, largest)
    inputs = rule.inputs(T=T, V=17, requires_grad=False)

    def run(x: Tensor, name: str = "initial_state", in_place: bool = False) -> Tensor:
        given = inputs | {"initial_state": inputs["initial_state"].clone(), name: x}
        return rule.run(given, "native", in_place=in_place)[0]

    refused = pytest.raises(NotImplementedError, match=r"carries a tangent.*use backend='reference'")
    for name, x in inputs.items():
        for in_place in (False, True) if x is not None else ():
            with forward_ad.dual_level():
                run(x.clone(), name, in_place)  # there is no tangent
                with refused:
                    run(forward_ad.make_dual(x, x), name, in_place)
    for transformed in (torch.func.jacfwd(run), lambda x: torch.func.jvp(run, (x,), (x,))):
        with refused:
            transformed(inputs["initial_state"])


@pytest.mark.parametrize("rule", [*PRINCIPAL, *SCANNED])
def test_no_gradient_is_no_gradient(rule):
    """Steps between kept states are kept for a backward pass only."""
    arguments = arguments_of(rule, rule.inputs(T=200))
    forward, kept = (OPERATORS.selective_scan_forward, 1) if rule is SCAN else (OPERATORS.rule_forward, 2)
    assert [forward(*arguments, interval)[2].shape[kept] for interval in (64, 0)] == [3, 0]
    out, _, _ = forward(*arguments, 0)
    with pytest.raises(RuntimeError, match="kept no states"):
        out.sum().backward()


@pytest.mark.parametrize("rule", OTHERS)
def test_how_many_states_are_kept_changes_no_bit(rule, monkeypatch):
    """On a GPU intervals are multiples of 64, and another way to do a call could be chosen for each."""
    on_cpu = backends.EXTENSIONS[DEVICE.type] == "cpu"
    if not on_cpu:
        monkeypatch.setenv("FASTWEIGHTS_CUDA_ALGORITHM", os.environ.get("FASTWEIGHTS_CUDA_ALGORITHM") or "recurrent")
        monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", "segments=1")
    inputs = rule.inputs(T=150, K=9, V=10)
    expected = outcome(rule, "native", inputs)
    for interval in (16, 32, 48, 64, 128, 512) if on_cpu else (64, 128, 512):
        monkeypatch.setattr(kernels, "_interval", lambda *_, steps=interval: steps)
        assert_same(outcome(rule, "native", inputs), expected, f"with a state every {interval} steps")


def test_states_take_less_than_a_quarter_of_inputs_and_gradients(monkeypatch):
    monkeypatch.setitem(kernels.INTERVALS, "cpu", (64, 128, 256))
    for K, V, dtype, interval in (
        *[(128, 127, torch.float32, 64), (128, 128, torch.float32, 128), (128, 128, torch.float64, 128)],
        *[(64, 63, torch.bfloat16, 64), (64, 64, torch.bfloat16, 128), (512, 512, torch.float32, 256)],
    ):
        k, v = (torch.empty(1, 1, 1, n, dtype=dtype) for n in (K, V))
        assert kernels._interval(k, v) == interval, (K, V, dtype)
