"""The CUDA kernels for sequences, emulated, against the float64 reference: outputs, final states and all gradients."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.cuda.emulated import GATES, TOLERANCE, EmulationError, check, expected, long, weights_for
from tests.ops.agreement import assert_close, assert_same, parts, relative_error
from tests.ops.results import definition
from tests.ops.rules import PRINCIPAL, RULE, RULES, RULES_AND_REGIMES, deal

BY_HEAD = [RULE[name] for name in ("sum", "gated", "delta", "gated delta")]
DECAYS = [RULE[name] for name in ("decay", "decay of keys", "decay of values")]
CORRECTING = [rule for rule in RULES if rule.corrects]
BY_DIMENSION = [*DECAYS, *CORRECTING[2:]]  # decays of each key or value, or erase keys
CHUNKED = [*BY_HEAD, *BY_DIMENSION]  # of decays of neither there is a sum
WAYS = [*product(["recurrent"], [*PRINCIPAL, *CORRECTING[1:]]), *product(["chunked"], CHUNKED)]

F32, F16, BF16, F64 = EVERY_DTYPE = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
TWO_DTYPES = [F32, BF16]

# Of time, keys, values and the interval between kept states. Each tile of the recurrent kernels, one step, fewer steps
# than an interval, intervals that do not divide the time, none, more columns than a block takes.
RECURRENT = [
    *[(1, 1, 1, 0), (2, 3, 5, 1), (17, 16, 16, 4), (67, 33, 20, 16), (20, 64, 64, 64), (40, 4, 70, 7)],
    *[(9, 130, 33, 3), (5, 512, 70, 4), (19, 5, 7, 8), (19, 16, 24, 8)],
]
PAPERS = [(4, 64), (16, 16), (16, 64), (32, 32), (32, 128), (64, 64), (64, 128), (256, 64), (512, 64), (256, 512)]


@pytest.mark.parametrize(
    ("rule", "sizes", "dtype"),
    long(
        [*product(RULES, RECURRENT, EVERY_DTYPE), *product(PRINCIPAL, [(70, *size, 32) for size in PAPERS], [F32])],
        short=deal(RULES, RECURRENT, EVERY_DTYPE),
    ),
)
def test_every_shape_step_by_step(emulator, rule, sizes, dtype):
    T, K, V, interval = sizes
    check(emulator, rule, "recurrent", interval, B=1, T=T, K=K, V=V, dtype=dtype)


# Sizes, and the plan that the chunked kernels are asked for: parts of keys and values in the last stage, keys that
# several warps share, several blocks of a head, one buffer, two and four, slices of time, segments of slices, warps
# that copy for the others or none.
WAYS_BY_CHUNKS = [
    *[((1, 1, 1, 64), ""), ((70, 20, 72, 64), "columns=32"), ((130, 16, 9, 128), "slice=1")],
    *[((200, 9, 17, 64), "segments=2"), ((150, 33, 40, 64), "columns=32 stages=1"), ((65, 130, 20, 64), "stages=1")],
    *[((300, 5, 6, 64), "slice=3 segments=2"), ((129, 70, 8, 64), "segments=3")],
]
MORE_WAYS = [
    *[((63, 64, 64, 64), ""), ((64, 40, 130, 0), ""), ((400, 16, 16, 128), "slice=4 segments=2")],
    *[((90, 260, 20, 64), ""), ((40, 512, 40, 64), ""), ((40, 24, 512, 64), "")],
    *[((700, 8, 24, 256), "stages=2 segments=3"), ((129, 300, 80, 64), "")],
    *[((330, 20, 16, 128), "stages=2 threads=32"), ((330, 64, 33, 64), "columns=32 threads=64")],
    *[((80, 256, 64, 64), ""), ((40, 512, 512, 64), ""), ((40, 257, 130, 64), ""), ((520, 8, 8, 64), "")],
]
# About multiples of 16, 32 and 64 steps, keys and values; intervals of one chunk, of several, longer than the sequence.
SHAPES = [
    *[(15, 3, 16, 64), (16, 16, 3, 64), (17, 33, 32, 64), (63, 32, 33, 64), (64, 64, 64, 64), (65, 16, 128, 64)],
    *[(130, 64, 32, 64), (130, 32, 64, 128), (66, 128, 1, 64), (33, 16, 144, 64), (390, 16, 32, 256)],
    *[(70, 33, 130, 64), (100, 200, 64, 64)],
]


def fitting(cases, dtypes):
    """Cases whose backward pass fits: with a correction up to 320 keys in float32, with decays up to 192 or 384."""

    def most_keys(rule, dtype):
        if not rule.corrects:
            return 512
        return (192 if rule in BY_DIMENSION else 320) if dtype == F32 else 384 if rule in BY_DIMENSION else 512

    return [x for x in product(CHUNKED, cases, dtypes) if x[1][0][1] <= most_keys(x[0], x[2])]


@pytest.mark.parametrize(
    ("rule", "way", "dtype"),
    long(
        [
            *fitting([*WAYS_BY_CHUNKS, *((sizes, "") for sizes in SHAPES)], EVERY_DTYPE[:3]),
            *fitting(MORE_WAYS, TWO_DTYPES),
        ],
        short=deal(CHUNKED, WAYS_BY_CHUNKS, EVERY_DTYPE[:3]),
    ),
)
def test_every_way_by_chunks_in_any_order_of_threads(emulator, rule, way, dtype, monkeypatch):
    (T, K, V, interval), plan = way
    monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", plan)
    inputs = rule.inputs(B=1, T=T, H=2, K=K, V=V, dtype=dtype)
    first = emulator.run(inputs, interval=interval, algorithm="chunked")
    assert_close(first, expected(rule, inputs), TOLERANCE["chunked"][dtype])
    with emulator.schedule(1):
        assert_same(emulator.run(inputs, interval=interval, algorithm="chunked"), first, "in another order")


# 64 value columns to a block and 64 keys or more to a warp, which a warpgroup multiplies: a chunk and part of the next,
# 128 keys to a warp, keys that two warpgroups share.
GROUPS = [
    *[((80, 64, 40, 64), "columns=64 stages=1"), ((66, 90, 64, 0), "columns=64")],
    *[((70, 130, 33, 64), "columns=64"), ((140, 64, 50, 0), "columns=64 threads=128")],
]


@pytest.mark.parametrize(
    ("rule", "way", "dtype"),
    long(
        [*product(CHUNKED, GROUPS, [BF16]), *product(CHUNKED, GROUPS[:2], [F16])],
        short=[(rule, GROUPS[i % len(GROUPS)], BF16) for i, rule in enumerate(CHUNKED)],
    ),
)
def test_warpgroups_agree_with_warps(emulator, rule, way, dtype, monkeypatch):
    (T, K, V, interval), plan = way
    monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", plan)
    inputs = rule.inputs(B=1, T=T, H=1, K=K, V=V, dtype=dtype)
    first = emulator.run(inputs, interval=interval, algorithm="chunked")
    assert_close(first, expected(rule, inputs), TOLERANCE["chunked"][dtype])
    with emulator.schedule(1):
        assert_same(emulator.run(inputs, interval=interval, algorithm="chunked"), first, "in another order")
    with emulator.device(80, 227 * 1024):  # which has no wgmma
        assert_same(emulator.run(inputs, interval=interval, algorithm="chunked"), first, "by each warp")


def test_where_a_slice_of_time_is_too_much_heads_follow_one_another(emulator):
    rule = RULE["gated delta"]
    inputs = rule.inputs(B=2, T=5, H=40, K=3, V=2)
    actual = emulator.run(inputs, interval=64, algorithm="chunked")
    assert_close(actual, expected(rule, inputs), TOLERANCE["chunked"][F32])
    # For each head two squares' lower blocks, two states, two of 64 steps, and values derived from gates.
    of_all = 80 * (2 * 10 * 16 * 16 + 2 * 16 * (16 + 64) + 1800) * 4
    assert emulator.workspaces["delta_backward"] < of_all * 0.6


@pytest.mark.parametrize("rule", PRINCIPAL)
@pytest.mark.parametrize(("T", "K", "V"), [(21, 20, 40), (21, 100, 36), (390, 3, 5)])
def test_steps_in_any_order_of_threads(emulator, rule, T, K, V):
    inputs = rule.inputs(B=1, T=T, H=1 if T > 300 else 2, K=K, V=V)
    first = emulator.run(inputs, interval=6)
    for seed in (1, 7):
        with emulator.schedule(seed):
            assert_same(emulator.run(inputs, interval=6), first, f"in order {seed}")


# With the plan that is asked for: where time is divided among blocks, gates near one show errors in the
# states that pass from one to the next. In STEPS the second case divides it.
STEPS = [(67, 6, 7, 16, ""), (384, 3, 4, 64, "")]
CHUNKS = [(67, 6, 7, 64, "segments=2"), (100, 20, 9, 64, ""), (540, 12, 10, 128, "")]
REGIMES = [
    *product(["recurrent"], RULES, STEPS[:1], [F32]),
    *product(["recurrent"], DECAYS, STEPS[1:], [F32]),
    *product(["chunked"], CHUNKED, CHUNKS[:1], EVERY_DTYPE[:3]),
]


@pytest.mark.parametrize(
    ("algorithm", "rule", "sizes", "dtype"),
    long([*REGIMES, *product(["chunked"], CHUNKED, CHUNKS[1:], TWO_DTYPES)], short=REGIMES),
)
def test_every_regime(emulator, algorithm, rule, sizes, dtype, monkeypatch):
    T, K, V, interval, plan = sizes
    monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", plan)
    inputs = rule.in_regimes(rule.regimes, B=1, T=T, H=1, K=K, V=V, dtype=dtype, extras_dtype=torch.float32)
    found = parts(emulator.run(inputs, interval=interval, algorithm=algorithm), rule.regimes)
    wanted = parts(expected(rule, inputs), rule.regimes)
    # After tiny gates, states have few digits in float16.
    allowed = {name: 0.03 if dtype == F16 and "(tiny)" in name else TOLERANCE[algorithm][dtype] for name in wanted}
    errors = {name: relative_error(found[name], wanted[name]) for name in wanted}
    assert not {name: error for name, error in errors.items() if not error <= allowed[name]}


# Factors of inputs, and of the gradients of outputs and final states, by the values that leave float16's range.
BEYOND_FLOAT16 = {
    "states and updates": {"initial_state": 18, "v": 10, "q": -8, "d_out": -9, "d_final_state": -16},
    "gradients of states": {"q": 7, "k": -9, "v": -9, "erase": -9, "d_out": 10, "d_final_state": 17},
    "scores": {"q": 9, "k": 9, "v": -12, "d_out": -10, "d_final_state": -10},
}


@pytest.mark.parametrize(
    ("rule", "beyond"),
    # Keys so large would let the state of a rule that corrects grow with every step.
    [(rule, x) for rule, x in product(CHUNKED, BEYOND_FLOAT16) if x != "scores" or not rule.corrects],
)
def test_of_float16_only_inputs_and_results_have_to_be_in_its_range(emulator, rule, beyond):
    def scaled(name, x):
        return None if x is None else x.detach() * 2.0 ** BEYOND_FLOAT16[beyond].get(name, 0)

    inputs = rule.inputs(B=1, T=35, H=1, K=16, V=20, dtype=F16, extras_dtype=F32)
    inputs = {name: None if x is None else scaled(name, x).requires_grad_() for name, x in inputs.items()}
    weights = tuple(map(scaled, ("d_out", "d_final_state"), weights_for(inputs)))
    actual, wanted = (
        emulator.run(inputs, interval=64, algorithm="chunked", weights=weights),
        definition(rule, inputs, weights),
    )
    assert all(x is None or bool(x.isfinite().all()) for x in actual.values())
    assert_close(actual, wanted, TOLERANCE["chunked"][F16])


@pytest.mark.parametrize(("algorithm", "dtype"), [("recurrent", torch.float32), *product(["chunked"], TWO_DTYPES)])
def test_retention_is_a_gate_whose_writes_are_whole(emulator, algorithm, dtype):
    """The same log decay for every key dimension."""
    rule = RULE["gated"]
    inputs = rule.in_regimes(rule.regimes, B=1, T=67, H=1, K=6, V=9, dtype=dtype, extras_dtype=torch.float32)
    actual = emulator.run(inputs, interval=64, algorithm=algorithm, complement=False)
    gate = inputs["log_gate"].detach()[..., None].requires_grad_()
    arguments = {**inputs, "log_key_decay": gate, "log_value_decay": None}
    del arguments["log_gate"]
    wanted = expected(RULE["decay"], arguments)
    wanted["gradient of log_gate"] = wanted.pop("gradient of log_key_decay").squeeze(-1)
    wanted = {name: wanted[name] for name in actual}
    assert_close(parts(actual, rule.regimes), parts(wanted, rule.regimes), TOLERANCE[algorithm][dtype])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rule", [RULE["gated"], RULE["decay"], *CORRECTING])
def test_gates_in_float32(emulator, rule, dtype):
    # The gates' own gradients are held to the inputs' tolerance: v and k are rounded to it.
    inputs = rule.inputs(T=19, K=9, V=12, dtype=dtype, extras_dtype=torch.float32)
    tolerance = 1e-6 if dtype == torch.float64 else TOLERANCE["recurrent"][dtype]
    assert_close(emulator.run(inputs, interval=8), expected(rule, inputs), tolerance)


@pytest.mark.parametrize("use", ["out", "final_state"])
@pytest.mark.parametrize(("algorithm", "rule"), WAYS)
def test_without_an_initial_state_and_with_either_gradient_alone(emulator, algorithm, rule, use):
    inputs = rule.inputs(B=1, T=21, H=2, K=17, V=9, initial_state=False)
    d_out, d_final = weights_for(inputs)
    weights = (d_out, None) if use == "out" else (torch.zeros_like(d_out), d_final)
    interval = 64 if algorithm == "chunked" else 16
    actual = emulator.run(inputs, interval=interval, algorithm=algorithm, weights=weights)
    assert_close(actual, definition(rule, inputs, weights), TOLERANCE[algorithm][torch.float32])


@pytest.mark.parametrize("interval", [0, 1, 2, 16, 31, 40, 70])
@pytest.mark.parametrize("rule", PRINCIPAL)
def test_every_interval(emulator, rule, interval):
    check(emulator, rule, "recurrent", interval, B=1, T=70, H=1, K=5, V=7)


@pytest.mark.parametrize("rule", CHUNKED)
def test_how_many_states_are_kept_changes_no_bit(emulator, rule, monkeypatch):
    """States that are computed again are those that the forward pass had."""
    monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", "segments=1")
    inputs = rule.inputs(B=1, T=150, H=1, K=9, V=10, dtype=torch.bfloat16)
    first = emulator.run(inputs, interval=64, algorithm="chunked")
    for interval in (128, 512):
        assert_same(emulator.run(inputs, interval=interval, algorithm="chunked"), first, f"at interval {interval}")


@pytest.mark.parametrize(("algorithm", "rule"), WAYS)
def test_kept_states_are_those_before_their_steps(emulator, algorithm, rule):
    T, interval = {"recurrent": (23, 5), "chunked": (193, 64)}[algorithm]
    inputs = rule.inputs(T=T, K=6, V=10, requires_grad=False)
    states = emulator.forward(inputs, interval, algorithm)["states"]
    wanted = []
    for end in range(interval, T, interval):
        prefix = {name: x if x is None or name == "initial_state" else x[:, :end] for name, x in inputs.items()}
        wanted.append(definition(rule, prefix, None)["final_state"])
    assert len(wanted) > 2
    assert_close({"states": states}, {"states": torch.stack(wanted, dim=2)}, TOLERANCE[algorithm][torch.float32])


# Steps of few heads, divided in time without being asked: for decays by dimension alone.
FEW = [(T, 5, 7, interval, True) for T, interval in [(384, 128), (391, 64), (512, 96), (520, 5)]]
FEW += [(400, 36, 40, 128, False)]  # states that several blocks share


@pytest.mark.parametrize(("rule", "sizes", "dtype"), deal(DECAYS, FEW, EVERY_DTYPE))
def test_few_heads_are_divided_in_time(emulator, rule, sizes, dtype):
    """One head leaves most of the emulated device's multiprocessors idle: its steps are worked on in segments."""
    T, K, V, interval, initial_state = sizes
    shape = {"B": 1, "T": T, "H": 1, "K": K, "V": V, "dtype": dtype, "initial_state": initial_state}
    check(emulator, rule, "recurrent", interval, **shape)
    assert all(emulator.workspaces[f"diagonal_{way}"] > 0 for way in ("forward", "backward"))


@pytest.mark.parametrize(
    ("T", "heads", "interval", "ways"),
    [(400, 1, 64, ["forward", "backward"]), (380, 1, 64, []), (400, 1, 0, ["forward"]), (384, 355, 64, [])],
    ids=["divided", "too short", "no state to start the way back from", "enough heads"],
)
def test_nothing_is_divided_without_need(emulator, T, heads, interval, ways):
    for way in ("forward", "backward"):
        sizes = (1, T, heads, 2, 2, interval)
        size = emulator.workspace(f"diagonal_{way}", "recurrent", sizes, torch.float32, GATES[1:3])
        assert bool(size) == (way in ways), way


def strided(x, how):
    """The values of a (batch, time, heads[, dim]) tensor within a larger one that is NaN elsewhere."""
    if x is None:
        return None
    if how == "time first":  # as fairseq has it: (time, batch, heads * dim)
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    rest = x.shape[3:]
    # "padded": whole vectors fit before and behind; "odd": every row starts at another alignment.
    before, more = (8, 8) if how == "padded" else (1, 2)
    B, T, H = x.shape[:3]
    shape = (B, T + 2, H, rest[0] + before + more) if rest else (B, T + 2, H + 1)
    wide = torch.full(shape, torch.nan, dtype=x.dtype)
    view = wide[:, :T, :, before : before + rest[0]] if rest else wide[:, :T, :H]
    return view.copy_(x)


@pytest.mark.parametrize("how", ["time first", "padded", "odd"])
@pytest.mark.parametrize("dtype", TWO_DTYPES)
@pytest.mark.parametrize(("algorithm", "rule"), WAYS)
def test_strides_do_not_change_a_bit(emulator, algorithm, rule, dtype, how):
    interval = 64 if algorithm == "chunked" else 16
    inputs = rule.inputs(B=2, T=35, H=2, K=8, V=16, dtype=dtype, requires_grad=False)
    d_out, d_final = weights_for(inputs)
    first = emulator.run(inputs, interval=interval, algorithm=algorithm)
    views = {name: x if name == "initial_state" else strided(x, how) for name, x in inputs.items()}
    weights = (strided(d_out, how), d_final)
    assert_same(emulator.run(views, interval=interval, algorithm=algorithm, weights=weights), first, how)


@pytest.mark.parametrize(("capability", "shared_memory"), [(70, 96), (75, 64), (80, 163), (86, 99)])
@pytest.mark.parametrize(("algorithm", "rule"), WAYS)
def test_devices_with_less_shared_memory(emulator, algorithm, rule, capability, shared_memory):
    family, by_dimension = "delta" if rule.corrects else "diagonal", rule in BY_DIMENSION
    T, interval = (70, 64) if algorithm == "recurrent" else (17, 32)
    with emulator.device(capability, shared_memory * 1024):
        if algorithm != "recurrent":
            for way in ("forward", "backward"):
                sizes = (1, T, 1, 64, 64, interval)
                taken = emulator.supports(f"{family}_{way}", sizes, torch.float32, capability, by_dimension)
                assert taken == (capability >= 80)
            if not taken:
                return
        check(emulator, rule, algorithm, interval, B=1, T=T, H=1, K=64, V=64)


@pytest.mark.parametrize("rule", PRINCIPAL)
def test_no_batch_and_dimensions_beyond_the_kernels(emulator, rule):
    actual = emulator.run(rule.inputs(B=0, T=5), interval=2)
    assert all(x is None or x.numel() == 0 for x in actual.values())
    for K, V in ((513, 4), (4, 513)):
        with pytest.raises(EmulationError, match="returned 1"):
            emulator.run(rule.inputs(B=1, T=2, K=K, V=V), interval=2)


@pytest.mark.parametrize("dtype", TWO_DTYPES)
@pytest.mark.parametrize("rule", CHUNKED)
def test_a_nan_is_passed_on_in_its_column_alone(emulator, rule, dtype):
    """The NaN that a GPU makes, whose bits are all ones: to round it as if it were a number would make it 0. (The steps
    before it in its chunk may get it too: it is multiplied by 0 there.)"""
    inputs = rule.inputs(B=1, T=35, H=1, K=16, V=16, dtype=dtype, initial_state=False, requires_grad=False)
    bits, integers = (0x7FFF, torch.int16) if dtype == torch.bfloat16 else (0x7FFFFFFF, torch.int32)
    inputs["v"].view(integers)[0, 20, 0, 5] = bits
    found = emulator.forward(inputs, 64, "chunked")["out"][0, :, 0].isnan()
    assert bool(found[20:, 5].all()) and not bool(found[:, :5].any()) and not bool(found[:, 6:].any())


@pytest.mark.parametrize(
    ("rule", "shape"),
    long(
        [
            *product(CHUNKED, [(40, 64, 64), (40, 128, 96), (64, 256, 128)]),
            *[(rule, (40, 512, 512)) for rule in CHUNKED if rule not in CHUNKED[-2:]],
        ],
        short=[(rule, (40, 64, 64)) for rule in CHUNKED],
    ),
)
def test_bfloat16_costs_its_own_rounding_and_states_hardly_any(emulator, rule, shape):
    """Rounding of results makes an error of 0.0017; products also round states and scores. States are kept in float32:
    some error reaches those of the delta rule, whose writes depend on rounded reads, and those with decays by
    dimension, which scale rounded writes."""
    T, K, V = shape
    inputs = rule.inputs(B=1, T=T, H=1, K=K, V=V, dtype=torch.bfloat16)
    actual, wanted = emulator.run(inputs, interval=64, algorithm="chunked"), expected(rule, inputs)
    of_states = 3e-3 if rule in BY_DIMENSION else 2e-3 if rule.corrects else 4e-6
    for key, value in wanted.items():
        allowed = of_states if key.endswith("_state") else 0.004
        if key == "gradient of log_gate":
            allowed = 0.0055  # one number to a step: of eight lengths the mean is 0.0026, this one's by far the most
        if rule.name == "gated" and key == "gradient of q":
            allowed = 0.0019  # scores are multiplied with their own rounding errors
        assert value is None or relative_error(actual[key], value) <= allowed, key


@pytest.mark.parametrize("rule", BY_HEAD[2:])
def test_float16_products_in_tf32_are_rounded_to_it(emulator, rule):
    """The inverse and scores are rounded, too: tensor cores would cut them off, and the error would be above 5e-4."""
    inputs = rule.inputs(B=1, T=40, H=1, K=16, V=16, dtype=F16, extras_dtype=F32)
    actual, wanted = emulator.run(inputs, interval=64, algorithm="chunked"), expected(rule, inputs)
    assert relative_error(actual["gradient of v"], wanted["gradient of v"]) <= 4.5e-4


# 4096 steps: tolerances of results, and of states and their gradients. With repeated keys the state's gradient
# grows in directions that no key erases, while outputs, which read it along keys, stay small.
THOUSANDS = [
    *(("recurrent", rule, regime, "", F32, 1e-5, 1e-5) for rule, regime in RULES_AND_REGIMES),
    *(
        ("chunked", RULE[name], regime, plan, F32, 1e-5, 1e-5)
        for name, regime in [
            *[("sum", "ordinary"), ("gated", "tiny"), ("gated", "near one"), ("gated", "ordinary or erased")],
            *[("delta", "one"), ("delta", "repeated keys"), ("decay", "near one"), ("decay", "ordinary or erased")],
            *[("gated delta", regime) for regime in RULE["gated delta"].regimes],
            *[("decay of keys", "near one"), ("decay of keys", "ordinary or erased"), ("Kimi delta", "near one")],
            *[("Kimi delta", "ordinary or erased"), ("Kimi delta", "repeated keys, one")],
        ]
        for plan in ("", "segments=1")
    ),
    *(
        ("chunked", RULE[name], regime, plan, BF16, results, states)
        for name, regime, results, states in [
            *[("delta", "near one", 8e-3, 8e-3), ("delta", "repeated keys", 8e-3, 4e-3)],
            *[("delta", "repeated keys, one", 1e-2, 8e-3), ("gated delta", "near one", 8e-3, 8e-3)],
            *[("sum", "ordinary", 4e-3, 1e-5), ("gated", "near one", 4e-3, 3e-5)],
            *[("decay of keys", "near one", 4e-3, 3e-3), ("Kimi delta", "near one", 7e-3, 6e-3)],
            ("decay", "near one", 6e-3, 4e-3),
            *[("Kimi delta", "repeated keys, one", 7e-3, 6e-3), ("two gates", "ordinary", 5e-3, 3e-3)],
        ]
        for plan in ("", "segments=4")
    ),
]


@pytest.mark.parametrize(("algorithm", "rule", "regime", "plan", "dtype", "results", "states"), long(THOUSANDS))
def test_thousands_of_steps(emulator, algorithm, rule, regime, plan, dtype, results, states, monkeypatch):
    """Tensor cores cut a sum off towards zero; in states it would add up to more than is allowed."""
    monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", plan)
    size, interval = (4, 64) if algorithm == "recurrent" else (16, 128)
    inputs = rule.inputs(B=1, T=4096, H=1, K=size, V=size, dtype=dtype, extras_dtype=F32, regime=regime)
    actual, wanted = emulator.run(inputs, interval=interval, algorithm=algorithm), expected(rule, inputs)
    for key, value in wanted.items():
        allowed = states if key.endswith("_state") else results
        assert value is None or relative_error(actual[key], value) <= allowed, key
