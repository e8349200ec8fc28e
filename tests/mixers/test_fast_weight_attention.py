"""Memories compute their papers' equations, in one piece or in many, with and without
padding, in every precision.

Which parameters it has, how they start and what it refuses is in `test_attention_parameters.py`.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from fairseq.modules.checkpoint_activations import checkpoint_wrapper

from fairseq_fastweights import ops
from fairseq_fastweights.feature_maps import FEATURE_MAPS
from fairseq_fastweights.mixers.fast_weight_attention import FastWeightAttention
from fairseq_fastweights.mixers.memory_attention import MemoryAttention
from fairseq_fastweights.mixers.mixer import keeps_rows
from fairseq_fastweights.mixers.retention import Retention
from fairseq_fastweights.mixers.update_rules import UPDATE_RULES, Gate, UpdateRule

# Head dim 8. 13 steps are a prime, and enough for the normaliser of one step to differ from that of
# another by an order of magnitude.
TIME, BATCH, EMBED, HEADS = 13, 3, 16, 2

RULES = (*UPDATE_RULES, "retention")

# The bound of the design for float32, as the norm of the difference over the norm: room for the
# 6e-8 of every operation to add up over some dozens of them. A step that is left out, written twice
# or divided by its neighbour's normaliser costs more than 1e-3.
FLOAT32 = 1e-5

# Gradients go through the same operations twice, and sum over all steps terms of either sign.
FLOAT32_GRADIENT = 5e-5

# Rounding of float64 over the same operations, with room for sums of a few hundred.
FLOAT64 = 1e-12

# Five roundings of half a unit in the last place (2e-3 for bfloat16) lie between input and output,
# and normalisation divides two rounded sums: a percent at most is seen.
BFLOAT16 = 2e-2


@dataclass(frozen=True)
class Case:
    """One row of the table: a rule, a map and what is normalised."""

    rule: str
    feature_map: str
    normalization: frozenset[str] = frozenset()
    sizes: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        sizes = [f"{name}={value}" for name, value in self.sizes.items()]
        return "-".join([self.rule, self.feature_map, *sorted(self.normalization), *sizes])

    def build(self, **options: Any) -> MemoryAttention:
        torch.manual_seed(0)
        kind = {"retention": Retention}.get(self.rule, partial(FastWeightAttention, update_rule=self.rule))
        module = kind(
            **{
                "embed_dim": EMBED,
                "num_heads": HEADS,
                "feature_map": self.feature_map,
                "normalization": self.normalization,
                **self.sizes,
                **options,
            }
        )
        # FAVOR+ draws anew at every call in training, so only in evaluation can calls be compared.
        return module.eval()


def combinations(rule: str) -> list[frozenset[str]]:
    if rule == "retention":
        return [frozenset()]
    names = ["sum", "attention"] + (["removal"] if UPDATE_RULES[rule].corrects else [])
    sets: list[frozenset[str]] = [frozenset()]
    for name in names:
        sets += [chosen | {name} for chosen in sets]
    return sets


# Features that can be negative are not normalised here: their sums come near zero, where no two
# ways to round agree (and training diverges, of which the module warns).
CASES = [
    Case(rule, feature_map, normalization)
    for rule in RULES
    for feature_map in FEATURE_MAPS
    for normalization in combinations(rule)
    if FEATURE_MAPS[feature_map].positive or not normalization
]

# Each way of keeping the state, and of leaving a padded step out of it, once.
STATES = [
    Case("sum", "identity"),
    Case("sum", "elu", frozenset({"attention"})),
    Case("sum", "relu", frozenset({"sum", "attention"})),
    Case("gated", "identity"),
    Case("gated", "dpfp", frozenset({"attention"})),
    Case("decay", "identity"),
    Case("decay", "elu", frozenset({"attention"})),
    Case("delta", "elu", frozenset({"sum"})),
    Case("delta", "dpfp", frozenset({"sum", "attention"})),
    Case("delta", "favor", frozenset({"sum", "removal"})),
    Case("delta", "relu", frozenset({"sum", "attention", "removal"})),
    Case("delta", "elu", frozenset({"attention", "removal"})),
    Case("retention", "identity"),
    Case("retention", "elu", sizes={"feature_dim": 6}),
]


def cases(table: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", table, ids=str)


def sequence(time: int = TIME, batch: int = BATCH, width: int = EMBED, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(time, batch, width, generator=generator)


def in_pieces(module, x, lengths, padding=None, state=None):
    """The outputs of one call after another, each with the state that the one before left, and the last memory."""
    masks = [None] * len(lengths) if padding is None else padding.split(lengths, dim=1)
    outputs = []
    for piece, mask in zip(x.split(lengths), masks, strict=True):
        out, state = module(piece, state, mask, overwrite=True)
        outputs.append(out)
    return torch.cat(outputs), state["state"]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    scale = expected.double().norm().item() or 1.0
    return (actual.double() - expected.double()).norm().item() / scale


def gradients(module: torch.nn.Module, out: torch.Tensor) -> dict[str, torch.Tensor]:
    """By parameter, of a sum of all outputs with random signs and weights."""
    module.zero_grad()
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    (out * weights.to(out)).sum().backward()
    return {name: p.grad.clone() for name, p in module.named_parameters()}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, f"relative errors above {tolerance:g}: {wrong}"


# ------------------------------------------------------------------------------ the equations


def turned(x: torch.Tensor) -> torch.Tensor:
    """Each pair (i, i + half) of dimensions as a complex number, times e^(i n theta) at position n."""
    half = x.shape[-1] // 2
    theta = 10000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] * theta
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None, None]
    return torch.cat([z.real, z.imag], dim=-1)


def papers_equations(module: FastWeightAttention, x: torch.Tensor) -> torch.Tensor:
    """The whole module in float64, one step after another. `module` is one in float64.

    W is (value, key) as in the papers: Schlag et al. 2021 ("S"), Mao 2022 ("M"), Sun et al. 2023 ("R").
    """
    rule = "retention" if isinstance(module, Retention) else module.update_rule
    normalization = module.normalization

    def heads(y):
        return y.unflatten(-1, (module.num_heads, -1))

    def gate(name):
        return heads(getattr(module, f"{name}_proj")(x)).sigmoid()

    q, k = module.feature_map(heads(module.q_proj(x)), heads(module.k_proj(x)))
    v = heads(module.v_proj(x))
    if rule == "retention":  # R, Eq. 5: q_n gamma^n e^(i n theta), here the turns of it
        q, k = turned(q), turned(k)
    # Added wherever Eq. 28 and 29 divide by what can be exactly zero.
    eps = 1e-5 if type(module.feature_map).__name__ in ("ReluMap", "DpfpMap") else 0.0
    if "sum" in normalization:  # S, Eq. 29
        q = q / (q.sum(-1, keepdim=True) + eps)
        k = k / (k.sum(-1, keepdim=True) + eps)
    if rule == "gated":
        g = gate("gate")
    elif rule == "decay":
        f, d = gate("key_decay"), gate("value_decay")
    elif rule != "sum" and rule != "retention":
        beta = gate("beta")

    W = torch.zeros(*v.shape[1:], k.shape[-1], dtype=x.dtype)
    z = torch.zeros(k.shape[1:], dtype=x.dtype)
    outputs = []
    for t in range(len(x)):
        write = v[t][..., :, None] * k[t][..., None, :]
        if rule == "sum":  # S, Eq. 17-18
            W, z = W + write, z + k[t]
        elif rule == "gated":  # M, Eq. 5
            keep = g[t][..., None]
            W, z = keep * W + (1 - keep) * write, g[t] * z + (1 - g[t]) * k[t]
        elif rule == "decay":  # M, Eq. 7; the normaliser is a value of 1 that does not decay
            W = d[t][..., :, None] * f[t][..., None, :] * W + write
            z = f[t] * z + k[t]
        elif rule == "retention":  # R, Eq. 6 and 8
            W = (1 - 2.0 ** (-5 - torch.arange(module.num_heads)))[:, None, None] * W + write
        else:
            if hasattr(module, "forget_proj"):  # of fading_delta_rule
                W, z = gate("forget")[t][..., None, :] * W, gate("forget")[t] * z
            retrieved = (W * k[t][..., None, :]).sum(-1)  # S, Eq. 20
            if "removal" in normalization:  # S, Eq. 27; nothing is retrieved from nothing
                stored = (z * k[t]).sum(-1, keepdim=True)
                retrieved = torch.where(stored == 0, 0, retrieved / stored.masked_fill(stored == 0, 1))
            W = W + (beta[t] * (v[t] - retrieved))[..., :, None] * k[t][..., None, :]  # S, Eq. 24
            z = z + k[t]  # S, Eq. 26
        y = (W * q[t][..., None, :]).sum(-1)  # S, Eq. 25
        if "attention" in normalization:  # S, Eq. 28
            y = y / ((z * q[t]).sum(-1, keepdim=True) + eps)
        if rule == "retention":  # R, Eq. 8, and "QK^T / sqrt(d)" of Sec. 2.2
            y = y / k.shape[-1] ** 0.5
            y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
            g = heads(module.g_proj(x))[t]
            y = y * g * g.sigmoid()
        outputs.append(y)
    return module.out_proj(module.scale * torch.stack(outputs).flatten(-2))


@cases(CASES)
def test_outputs_and_gradients_are_those_of_the_papers_equations(case):
    module, x = case.build(), sequence()
    exact = copy.deepcopy(module).double()
    expected = papers_equations(exact, x.double())
    out, _ = module(x)
    assert relative_error(out, expected) <= FLOAT32
    actual = gradients(module, out)
    zero = [name for name, grad in actual.items() if not grad.norm() > 0]
    assert not zero, f"parameters without a gradient, or with one that is not a number: {zero}"
    assert_same(actual, gradients(exact, expected), FLOAT32_GRADIENT)


def fading_delta_rule(q, k, v, beta, log_forget, *, initial_state=None):
    """S' = f_t S_{t-1}, S_t = S' + beta_t (v_t - S' k_t) k_t^T, y_t = S_t q_t."""
    state = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]) if initial_state is None else initial_state
    outs = []
    for t in range(q.shape[1]):
        state = state * log_forget[:, t].reshape(*q.shape[:1], q.shape[2], -1, 1).exp()
        error = v[:, t] - (k[:, t, ..., None] * state).sum(-2)
        state = state + k[:, t, ..., None] * (beta[:, t, :, None] * error)[..., None, :]
        outs.append((q[:, t, ..., None] * state).sum(-2))
    return torch.stack(outs, dim=1), state


@pytest.mark.parametrize("normalization", ["attention", "attention,removal", "sum,removal"])
@pytest.mark.parametrize("per", ["head", "key"])
def test_the_normaliser_of_a_rule_that_corrects_and_decays_decays_too(per, normalization, monkeypatch):
    """A rule of one's own, of which there is a reference alone."""
    inputs = ops.GateInput("beta", per="head", log=False), ops.GateInput("log_forget", per=per, log=True)
    gates = Gate("beta", per="head", log=False), Gate("forget", per=per, log=True)
    operation = ops.Operation("fading", inputs, fading_delta_rule)
    rule = UpdateRule(operation, gates, "elu", frozenset({"attention"}), corrects=True)
    monkeypatch.setitem(UPDATE_RULES, "fading", rule)
    module, x = Case("fading", "elu", frozenset(normalization.split(","))).build().double(), sequence().double()
    expected = papers_equations(module, x)
    out, _ = module(x)
    assert relative_error(out, expected) <= FLOAT64
    assert_same(gradients(module, out), gradients(module, expected), FLOAT64)
    assert relative_error(in_pieces(module, x, [4, 1, 8])[0], expected) <= FLOAT64


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("options", [{"bias": False}, {"scale_read_out": True}], ids=str)
def test_options_change_what_they_say_and_nothing_else(rule, options):
    module = Case(rule, "elu", max(combinations(rule)[:2], key=len)).build(**options)
    assert module.scale == (8**-0.5 if "scale_read_out" in options else 1)
    exact = papers_equations(copy.deepcopy(module).double(), sequence().double())
    assert relative_error(module(sequence())[0], exact) <= FLOAT32


# ---------------------------------------------------------------------------- the three modes


@cases(CASES)
@torch.no_grad()
def test_one_piece_uneven_pieces_and_single_tokens_agree(case):
    module, x = case.build(), sequence()
    whole, state = in_pieces(module, x, [TIME])
    assert relative_error(module(x)[0], whole) <= FLOAT32
    for lengths in ([1, 5, 2, 4, 1], [1] * TIME):
        out, final = in_pieces(module, x, lengths)
        assert relative_error(out, whole) <= FLOAT32, lengths
        assert relative_error(final, state) <= FLOAT32, lengths


@cases(STATES)
def test_gradients_do_not_depend_on_where_a_text_is_cut(case):
    module, x = case.build(), sequence()
    expected = gradients(module, module(x)[0])
    for lengths in ([4, 6, 3], [1] * TIME):
        actual = gradients(module, in_pieces(module, x, lengths)[0])
        assert_same(actual, expected, FLOAT32_GRADIENT)


@cases(STATES)
@pytest.mark.parametrize("order", [[2, 0, 1], [1, 1, 1], [2, 0], [0, 0, 1, 1, 2, 2]], ids=lambda order: f"{order}")
def test_rows_of_the_state_follow_the_beam(case, order):
    """Rows that are swapped, doubled, dropped or multiplied go on from the state they are given."""
    module, x, order = case.build(), sequence(), torch.tensor(order)
    state = module.reorder(module(x[:5])[1], order)
    # What comes next differs between rows, also between those with one past.
    after = sequence(TIME - 5, batch=len(order), seed=3)
    out, _ = in_pieces(module, after, [1, 1, 6], state=state)
    expected = module(torch.cat([x[:5, order], after]))[0][5:]
    assert relative_error(out, expected) <= FLOAT32


@cases(STATES)
@torch.no_grad()
def test_a_step_changes_the_state_where_it_lies_and_an_order_that_keeps_rows_copies_nothing(case):
    module, x = case.build(), sequence()
    _, before = module(x[:2])
    kept = before["state"].clone()
    out, after = module(x[2:3], before)
    assert torch.equal(before["state"], kept)
    again, state = module(x[2:3], before, overwrite=True)
    assert torch.equal(again, out) and torch.equal(state["state"], after["state"])
    # With the normaliser of a rule that corrects, the memory and it lie side by side, each written anew.
    assert state["state"].data_ptr() == before["state"].data_ptr()
    assert module.reorder(state, torch.arange(BATCH)) is state
    assert len(module.reorder(state, torch.arange(BATCH - 1))["state"]) == BATCH - 1


@pytest.mark.parametrize(
    ("order", "rows", "kept"), [([0, 1, 2], 3, True), ([0, 1], 3, False), ([0, 1, 2], 2, False), ([1, 0], 2, False)]
)
def test_which_orders_keep_rows(order, rows, kept):
    assert keeps_rows(torch.tensor(order), rows) is kept


@cases(STATES)
def test_no_output_depends_on_a_later_input(case):
    module, x = case.build(), sequence()
    changed = x.clone()
    changed[6:] = sequence(seed=4)[6:]
    out, other = module(x)[0], module(changed)[0]
    # The same numbers through the same operations: rounding alone, of blocks that share sums.
    assert relative_error(other[:6], out[:6]) <= 1e-6
    assert relative_error(other[6:], out[6:]) > 0.1


@pytest.mark.parametrize("shape", [(0, 2), (3, 0)], ids=["no-steps", "no-rows"])
@cases(STATES)
def test_nothing_comes_of_nothing(case, shape):
    module = case.build()
    out, state = module(torch.zeros(*shape, EMBED))
    assert out.shape == (*shape, EMBED) and not state["state"].any()


# -------------------------------------------------------------------------------------- padding

# One row each: padding on the left, on the right, in the middle, everywhere in between, at no step.
PADDING = torch.tensor(
    [
        [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1],
        [0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ],
    dtype=torch.bool,
)


@cases(STATES)
@pytest.mark.parametrize("lengths", [[TIME], [3, 1, 4, 5], [1] * TIME], ids=lambda ls: f"{len(ls)}")
def test_padding_neither_writes_nor_decays(case, lengths):
    module, x = case.build(), sequence(batch=len(PADDING))
    # What stands at padded positions is large, so that a trace of it would be seen.
    x[PADDING.t()] *= 100
    out, state = in_pieces(module, x, lengths, PADDING)
    grads = gradients(module, out.masked_fill(PADDING.t()[..., None], 0))
    total: dict[str, torch.Tensor] = {}
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    module.zero_grad()
    for row, padded in enumerate(PADDING):
        alone, end = in_pieces(module, x[~padded, row : row + 1], [int((~padded).sum())])
        assert relative_error(out[~padded, row], alone[:, 0]) <= FLOAT32, f"row {row}"
        assert relative_error(state[row], end[0]) <= FLOAT32, f"state of row {row}"
        (alone[:, 0] * weights[~padded, row]).sum().backward()
    total = {name: p.grad.clone() for name, p in module.named_parameters()}
    assert_same(grads, total, FLOAT32_GRADIENT)


@cases(CASES)
def test_rows_of_nothing_but_padding_are_finite(case):
    module, x = case.build(), sequence(batch=2).requires_grad_()
    padding = torch.zeros(2, TIME, dtype=torch.bool)
    padding[0] = True
    padding[1, :4] = True
    out, state = module(x, None, padding)
    assert out.isfinite().all()
    assert not state["state"][0].any(), "a row of padding has left something"
    grads = gradients(module, out)
    assert all(grad.isfinite().all() for grad in grads.values())
    assert x.grad is not None and x.grad.isfinite().all()


# ------------------------------------------------------------------------------------ precision


def halved(module, x, dtype):
    """The module and its input in a half type, and in float32 with exactly the same numbers."""
    module, x = copy.deepcopy(module).to(dtype), x.to(dtype)
    return module, x, copy.deepcopy(module).float(), x.float()


# The delta rule with keys that nothing normalises multiplies its state by up to 1 - beta |k|^2 in
# every step: within these 13 it is out of float16's range, and every rounding with it.
BOUNDED = [c for c in CASES if c.rule != "delta" or c.normalization & {"sum", "removal"}]


@pytest.mark.parametrize(
    ("case", "dtype"),
    zip(BOUNDED, itertools.cycle([torch.bfloat16, torch.float16]), strict=False),
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_half_types_are_finite_and_near_float32(case, dtype):
    low, x, exact, same_x = halved(case.build(), sequence(), dtype)
    out, state = in_pieces(low, x, [6, 7])
    assert out.dtype == dtype and state.dtype == torch.float32
    assert relative_error(out, in_pieces(exact, same_x, [6, 7])[0]) <= BFLOAT16
    assert all(grad.isfinite().all() for grad in gradients(low, out).values())


@pytest.mark.parametrize(
    "case",
    [
        Case("sum", "elu", frozenset({"attention"})),
        Case("sum", "dpfp", frozenset({"attention"})),
        Case("gated", "elu", frozenset({"attention"})),
        Case("sum", "favor", frozenset({"attention"})),
    ],
    ids=str,
)
def test_the_normaliser_of_a_long_text_does_not_overflow_float16(case):
    """z_t . q_t grows with the text: 160 a step for heads of 128 and ELU + 1, past float16's 65,504
    after 400 steps (Mao 2022, App. A keeps it in float32)."""
    module = case.build(embed_dim=128, num_heads=1)
    low, x, exact, same_x = halved(module, sequence(600, batch=1, width=128), torch.float16)
    out, _ = low(x)
    assert relative_error(out[-50:], exact(same_x)[0][-50:]) <= BFLOAT16
    assert all(grad.isfinite().all() for grad in gradients(low, out).values())


@pytest.mark.parametrize("rule", ["sum", "delta"])
@pytest.mark.parametrize("scale", [1.0, 6.0, 8.0, 10.0, 12.0, 20.0, 1000.0])
def test_long_queries_and_keys_of_favor_leave_gradients_finite(rule, scale):
    """Features of e^-(|x|^2 / 2) and smaller, divided by their sums."""
    torch.manual_seed(0)
    module = FastWeightAttention(128, 4, update_rule=rule, feature_map="favor", favor_features=64).train()
    x = (scale * sequence(16, batch=8, width=128)).requires_grad_()
    out, _ = module(x)
    assert out.isfinite().all() and (rule == "sum" or out.abs().max() > 1e-3 * scale)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), [x, *module.parameters()]))


@pytest.mark.parametrize("normalization", [frozenset(), frozenset({"attention"})], ids=sorted)
def test_large_features_of_favor_do_not_overflow_float16(normalization):
    """Products of features beyond 65,504, though the read-out that they come to is not."""
    module, x = Case("gated", "favor", normalization).build(), sequence()
    feature = module.feature_map.features[0]
    feature.mul_(17**0.5 / feature.norm())  # exp(17) / 34 = 7e5
    with torch.no_grad():
        for projection in (module.q_proj, module.k_proj):  # phi is largest at a feature itself
            projection.weight.mul_(0.1)
            projection.bias.copy_(feature.repeat(HEADS) * len(feature) ** 0.25)
        module.v_proj.weight.mul_(1e-3)
        module.v_proj.bias.zero_()
    q, k = module.feature_map(*[module.q_proj(x).unflatten(-1, (HEADS, -1))] * 2)
    assert (q * k).max() > 65_504, "the test does not test what it says"
    low, x, exact, same_x = halved(module, x, torch.float16)
    out, _ = low(x)
    assert out.isfinite().all() and relative_error(out, exact(same_x)[0]) <= BFLOAT16
    if normalization:  # otherwise the gradient of v is what leaves the range, for any computation
        assert all(grad.isfinite().all() for grad in gradients(low, out).values())


@cases(STATES)
def test_autocast_is_near_float32(case):
    module, x = case.build(), sequence()
    expected, state = in_pieces(module, x, [6, 7])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, low_state = in_pieces(module, x, [6, 7])
    assert low_state.dtype == torch.float32
    # Weights and inputs are rounded as well, once each.
    assert relative_error(out, expected) <= 2 * BFLOAT16
    assert relative_error(low_state, state) <= 2 * BFLOAT16
    assert all(grad.isfinite().all() for grad in gradients(module, out.float()).values())


@cases(STATES)
def test_on_meta_it_tells_the_shapes(case):
    module, x = case.build().to("meta"), sequence(3).to("meta")
    out, state = in_pieces(module, x, [1, 2])
    assert out.is_meta and out.shape == x.shape and state.is_meta
    assert all(grad.is_meta for grad in gradients(module, out).values())


# ----------------------------------------------------------------------------- chance in training


def test_dropout_acts_in_training_only():
    case, x = Case("delta", "elu", frozenset({"sum"})), sequence()
    plain, dropping = case.build(), case.build(dropout=0.5)
    assert torch.equal(dropping(x)[0], plain(x)[0])
    assert not torch.allclose(dropping.train()(x)[0], plain(x)[0])
    # Of the read-out, scaled up to keep its mean: the mean over many draws is the plain output.
    # 500 draws of standard deviation 1 (relative) leave 4.5 %; twice that is allowed, of a norm of
    # 600 numbers from a fixed seed.
    torch.manual_seed(5)
    with torch.no_grad():
        mean = sum(dropping(x)[0] for _ in range(500)) / 500
    assert relative_error(mean, plain(x)[0]) <= 0.09


def test_favor_draws_for_every_training_batch_and_never_in_evaluation():
    module, x = Case("sum", "favor", frozenset({"attention"})).build(), sequence()
    assert torch.equal(module(x)[0], module(x)[0])
    module.train()
    assert not torch.allclose(module(x)[0], module(x)[0])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@cases([Case("sum", "favor", frozenset({"attention"})), Case("delta", "favor", frozenset({"sum"}))])
def test_recomputed_activations_use_the_same_draws(case, dropout):
    plain = case.build(dropout=dropout).train()
    wrapped = checkpoint_wrapper(copy.deepcopy(plain))
    results = []
    for module in (plain, wrapped):
        torch.manual_seed(6)
        out, _ = module(sequence().requires_grad_())
        # What is drawn in between must not matter.
        torch.rand(7)
        results.append({"out": out, **gradients(module, out)})
    # The same operations on the same numbers.
    assert_same(results[1], results[0], 1e-7)


def test_every_update_rule_has_its_rows():
    for table in (CASES, STATES):
        assert {case.rule for case in table} == set(RULES)
    assert {case.feature_map for case in CASES} == set(FEATURE_MAPS)
