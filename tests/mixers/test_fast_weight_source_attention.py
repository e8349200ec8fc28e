"""Attention to a source as a whole computes Katharopoulos et al. 2020, Eq. 5: in one piece or token by token, for one
query or a beam of them, in every precision; and padding is no part of a source."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from fairseq.modules import MultiheadAttention

from fairseq_fastweights.feature_maps import FEATURE_MAPS
from fairseq_fastweights.mixers.fast_weight_source_attention import FastWeightSourceAttention
from fairseq_fastweights.mixers.mixer import State

# Heads of 8 numbers.
SOURCE, TARGET, BATCH, EMBED, HEADS = 11, 5, 3, 16, 2

MAPS = list(FEATURE_MAPS)
# Sums of features of either sign come near zero, where no two ways to round agree: those maps are compared in float64.
POSITIVE = [name for name, kind in FEATURE_MAPS.items() if kind.positive]

# Norm of the difference over the norm. Some dozens of operations of 6e-8 (float32) add up; a padded position that is
# read costs more than 1e-2.
FLOAT32 = 1e-5
# Gradients go through the same operations twice, and sum terms of either sign.
FLOAT32_GRADIENT = 5e-5
# Of maps that normalise by sums of either sign: the smallest of some hundred such sums costs three digits.
FLOAT64 = 1e-11
# Five roundings of half a unit in the last place (2e-3 for bfloat16) lie between input and output.
BFLOAT16 = 2e-2


def build(feature_map: str = "elu", *, dtype: torch.dtype = torch.float32, **options: Any) -> FastWeightSourceAttention:
    torch.manual_seed(0)
    options = {"embed_dim": EMBED, "num_heads": HEADS, "feature_map": feature_map, **options}
    # FAVOR+ draws anew at every call in training, so only in evaluation can calls be compared.
    return FastWeightSourceAttention(**options).eval().to(dtype)


def sequence(time: int, batch: int = BATCH, width: int = EMBED, seed: int = 1) -> torch.Tensor:
    return torch.randn(time, batch, width, generator=torch.Generator().manual_seed(seed))


def inputs(source_width: int = EMBED, batch: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and a source."""
    return sequence(TARGET, batch), sequence(SOURCE, batch, source_width, seed=2)


def attend(module: FastWeightSourceAttention, query: torch.Tensor, source: torch.Tensor, padding=None):
    return module(query, None, padding, source=source)[0]


def steps(module, query, source, padding=None) -> tuple[torch.Tensor, State]:
    """As a decoder asks in generation: the outputs, and the memory."""
    outputs, state = [], None
    for q in query.split(1):
        out, state = module(q, state, padding, source=source, overwrite=True)
        outputs.append(out)
    assert state is not None
    return torch.cat(outputs), state


def one_by_one(*arguments) -> torch.Tensor:
    return steps(*arguments)[0]


def rows_of(state: State) -> int:
    """Of how many sources a memory is kept."""
    (rows,) = {len(x) for x in state.values()}
    return rows


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    scale = expected.double().norm().item() or 1.0
    return (actual.double() - expected.double()).norm().item() / scale


def gradients(module: torch.nn.Module, out: torch.Tensor, **leaves: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a sum of all outputs with random weights, by parameter, and by name for other leaves."""
    leaves |= dict(module.named_parameters())
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    return dict(zip(leaves, torch.autograd.grad((out * weights).sum(), list(leaves.values())), strict=True))


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, f"relative errors above {tolerance:g}: {wrong}"


# One row each: padding on the left, on the right, nowhere.
PADDING = torch.tensor([[1] * 4 + [0] * 7, [0] * 6 + [1] * 5, [0] * 11], dtype=torch.bool)

# ------------------------------------------------------------------------------- the equation


def equation_5(module, query, source, padding=None) -> torch.Tensor:
    """sum_s sim(q, k_s) v_s / sum_s sim(q, k_s), sim = phi(q) . phi(k), one pair after another."""

    def heads(x):
        return x.unflatten(-1, (module.num_heads, -1))

    q, k = module.feature_map(heads(module.q_proj(query)), heads(module.k_proj(source)))
    v = heads(module.v_proj(source))
    # Added where the sum can be exactly zero (Schlag et al. 2021, Eq. 28).
    eps = 0.0 if type(module.feature_map).__name__ in ("EluMap", "FavorMap") else 1e-5
    rows = []
    for t in range(len(query)):
        for row in range(query.shape[1]):
            for head in range(module.num_heads):
                total, similarities = torch.zeros_like(v[0, 0, 0]), eps
                for s in range(len(source)):
                    if padding is None or not padding[row, s]:
                        similarity = (q[t, row, head] * k[s, row, head]).sum()
                        total = total + similarity * v[s, row, head]
                        similarities = similarities + similarity
                rows.append(total / similarities)
    read = torch.stack(rows).view(*query.shape[:2], -1)
    return module.out_proj(module.scale * read)


@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
@pytest.mark.parametrize("source_width", [EMBED, 24], ids=["own width", "other width"])
@pytest.mark.parametrize("feature_map", MAPS)
def test_outputs_and_gradients_are_those_of_the_equation(feature_map, source_width, padding):
    low = torch.float32 if feature_map in POSITIVE else torch.float64
    module = build(feature_map, dtype=low, source_dim=source_width)
    exact = copy.deepcopy(module).double()
    results = []
    for which, attention, dtype in ((module, attend, low), (exact, equation_5, torch.float64)):
        query, source = (x.to(dtype).requires_grad_() for x in inputs(source_width))
        out = attention(which, query, source, padding)
        results.append((out, gradients(which, out, query=query, source=source)))
    (out, actual), (expected, expected_gradients) = results
    assert relative_error(out, expected) <= (FLOAT32 if low is torch.float32 else FLOAT64)
    zero = [name for name, grad in actual.items() if not grad.norm() > 0]
    assert not zero, f"without a gradient, or with one that is not a number: {zero}"
    # The gradient of a division divides twice.
    assert_same(actual, expected_gradients, FLOAT32_GRADIENT if low is torch.float32 else 100 * FLOAT64)


@pytest.mark.parametrize("options", [{"bias": False}, {"scale_read_out": True}, {"feature_dim": 3}], ids=str)
def test_options_change_what_they_say(options):
    module = build(**options)
    assert module.scale == (8**-0.5 if "scale_read_out" in options else 1)
    assert (module.k_proj.bias is None) == ("bias" in options)
    exact = copy.deepcopy(module).double()
    assert relative_error(attend(module, *inputs()), equation_5(exact, *[x.double() for x in inputs()])) <= FLOAT32


def test_every_query_reads_all_of_the_source():
    """It is not causal: a change of any source position changes every output."""
    module, (query, source) = build(), inputs()
    out = attend(module, query, source)
    for s in range(SOURCE):
        changed = source.clone()
        changed[s] += 1
        assert (attend(module, query, changed) - out).abs().amax(dim=(1, 2)).min() > 1e-3


def test_without_a_source_it_reads_what_asks():
    module, (_, source) = build(), inputs()
    assert torch.equal(module(source, padding=PADDING)[0], attend(module, source, source, PADDING))


def test_parameters_are_those_of_fairseqs_attention():
    for width in (EMBED, 24):
        theirs = MultiheadAttention(EMBED, HEADS, kdim=width, vdim=width, encoder_decoder_attention=True)
        shapes = [
            {name: tuple(x.shape) for name, x in m.state_dict().items()} for m in (build(source_dim=width), theirs)
        ]
        assert shapes[0] == shapes[1]


# The paper's dimensions for heads of 64 (Schlag et al. 2021, Table 6).
@pytest.mark.parametrize(
    ("options", "size"),
    [({"feature_map": "favor", "favor_features": m}, 2 * m) for m in (128, 192, 256)]
    + [({"feature_map": "dpfp", "dpfp_nu": nu}, 128 * nu) for nu in (2, 3, 4)],
    ids=str,
)
def test_memories_have_the_papers_sizes(options, size):
    module = FastWeightSourceAttention(128, 2, **options).eval()
    _, state = module(torch.randn(3, 1, 128))
    assert {name: tuple(x.shape) for name, x in state.items()} == {
        "state": (1, 2, size, 64),
        "z": (1, 2, size),
        "copies": (1,),
    }
    assert size in (256, 384, 512)


# ------------------------------------------------------------------------------------ padding


@pytest.mark.parametrize("feature_map", MAPS)
def test_padding_is_no_part_of_a_source(feature_map):
    dtype = torch.float32 if feature_map in POSITIVE else torch.float64
    module, (query, source) = build(feature_map, dtype=dtype), (x.to(dtype) for x in inputs())
    # What stands at padded positions is large, so that a trace of it would be seen.
    source = source.masked_fill(PADDING.t()[..., None], 50.0).requires_grad_()
    out = attend(module, query, source, PADDING)
    for row, padded in enumerate(PADDING):
        alone = attend(module, query[:, row : row + 1], source[~padded, row : row + 1])
        assert relative_error(out[:, row : row + 1], alone) <= FLOAT32, f"row {row}"
    grads = gradients(module, out, source=source)
    assert not grads["source"][PADDING.t()].any() and grads["source"][~PADDING.t()].all()


def test_words_with_long_keys_do_not_vanish_beside_padding():
    """FAVOR+ divides the features of a row by the largest of them; padding's are up to e^180 times the words' here."""
    module, (query, source) = build("favor"), inputs()
    with torch.no_grad():
        module.k_proj.weight.mul_(20)
    exact = copy.deepcopy(module).double()
    # As an encoder has it: its key is the projection's bias.
    source = source.masked_fill(PADDING.t()[..., None], 0.0)
    low, high = ([x.to(dtype).requires_grad_() for x in (query, source)] for dtype in (torch.float32, torch.float64))
    expected = equation_5(exact, *high, PADDING)
    expected_gradients = gradients(exact, expected, query=high[0], source=high[1])
    for out in (attend(module, *low, PADDING), one_by_one(module, *low, PADDING)):
        assert relative_error(out, expected) <= FLOAT32
        assert_same(gradients(module, out, query=low[0], source=low[1]), expected_gradients, FLOAT32_GRADIENT)


@pytest.mark.parametrize("feature_map", MAPS)
def test_a_source_of_nothing_but_padding_is_finite(feature_map):
    module, (query, source) = build(feature_map), inputs()
    query, source = query.requires_grad_(), source.requires_grad_()
    padding = PADDING.clone()
    padding[0] = True
    out, state = module(query, None, padding, source=source)
    # Nothing is read: what is left is the output's bias.
    assert out.isfinite().all() and torch.equal(out[:, 0], module.out_proj.bias.expand(TARGET, -1))
    assert not state["state"][0].any() and not state["z"][0].any()
    assert all(grad.isfinite().all() for grad in gradients(module, out, query=query, source=source).values())


@torch.no_grad()
@pytest.mark.parametrize("beam", [1, 2])
@pytest.mark.parametrize(
    "shape", [(0, SOURCE, 2), (TARGET, 0, 2), (TARGET, SOURCE, 0)], ids=["queries", "source", "rows"]
)
def test_nothing_comes_of_nothing(shape, beam):
    module, (time, source_time, batch) = build(), shape
    module.beam_size = beam
    query, source = torch.ones(time, batch, EMBED), torch.ones(source_time, batch, EMBED)
    for padding in (None, torch.ones(batch, source_time, dtype=torch.bool)):
        out, state = module(query, None, padding, source=source)
        for each in (out, module(query, module.reorder(state, torch.arange(batch)), padding, source=source)[0]):
            assert each.shape == query.shape and each.isfinite().all()


# --------------------------------------------------------------------------------- generation


@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
@pytest.mark.parametrize("feature_map", MAPS)
def test_single_queries_give_what_all_at_once_give(feature_map, padding):
    dtype = torch.float32 if feature_map in POSITIVE else torch.float64
    module, (query, source) = build(feature_map, dtype=dtype), (x.to(dtype) for x in inputs())
    expected = attend(module, query, source, padding)
    out, state = steps(module, query, source, padding)
    assert relative_error(out, expected) <= FLOAT32
    # Once it is there the source is read from the memory: it need not be given again.
    assert relative_error(module(query, state)[0], expected) <= FLOAT32


def test_the_memory_neither_grows_nor_changes():
    module, (query, source) = build(), inputs()
    _, first = steps(module, query[:1], source)
    assert first["state"].shape == (BATCH, HEADS, 8, 8)
    kept = {name: x.clone() for name, x in first.items()}
    with torch.no_grad():
        _, after = module(query, first, source=source, overwrite=True)
    for state in (first, after):
        assert_same(state, kept, 0)


def copies(x: torch.Tensor, beam: int, dim: int = 1) -> torch.Tensor:
    """Every row `beam` times in a row, as beam search has the encoder's output."""
    return x.repeat_interleave(beam, dim=dim)


@torch.no_grad()
@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
@pytest.mark.parametrize("feature_map", POSITIVE)
@pytest.mark.parametrize("beam", [2, 4])
def test_a_beam_shares_one_memory(feature_map, beam, padding):
    module, source = build(feature_map), copies(inputs()[1], beam)
    query = sequence(TARGET, BATCH * beam)
    padding = None if padding is None else copies(padding, beam, dim=0)
    expected, alone = module(query, None, padding, source=source)
    assert rows_of(alone) == BATCH * beam, "nobody has said that there are beams"
    module.beam_size = beam
    # Several queries at once too, as a prefix that is forced could be read.
    for out, shared in (steps(module, query, source, padding), module(query, None, padding, source=source)):
        assert rows_of(shared) == BATCH
        assert relative_error(out, expected) <= FLOAT32


def test_where_gradients_are_wanted_rows_are_not_compared():
    """A training goes on after hypotheses were searched for, to validate it."""
    module, source = build(), copies(inputs()[1], 2).requires_grad_()
    module.beam_size = 2
    out, state = module(sequence(TARGET, BATCH * 2), source=source)
    assert rows_of(state) == BATCH * 2
    assert gradients(module, out, source=source)["source"].all()


@torch.no_grad()
def assert_nothing_shared(source: torch.Tensor, beam: int, padding: torch.Tensor | None = None) -> None:
    module, query = build(), sequence(TARGET, source.shape[1])
    expected = attend(module, query, source, padding)
    module.beam_size = beam
    out, state = steps(module, query, source, padding)
    assert rows_of(state) == source.shape[1]
    assert relative_error(out, expected) <= FLOAT32


@pytest.mark.parametrize(("batch", "beam", "padding"), [(4, 2, None), (4, 4, None), (3, 2, None), (3, 3, PADDING)])
def test_rows_of_different_sources_share_nothing(batch, beam, padding):
    """A beam size may be that of a search before this one: sources are compared, not believed."""
    assert_nothing_shared(sequence(SOURCE, batch, seed=2), beam, padding)


def test_copies_that_are_padded_differently_share_nothing():
    assert_nothing_shared(copies(sequence(SOURCE, 1, seed=2), 3), 3, PADDING)


def test_one_group_of_several_that_is_not_of_copies_is_enough_to_share_nothing():
    source = copies(sequence(SOURCE, 2, seed=2), 2)
    source[3, 3, 5] += 1e-3  # of the second group's second row
    assert_nothing_shared(source, 2)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(20))
def test_memories_follow_any_sequence_of_orders(seed):
    draw = random.Random(seed)
    beam, sentences = draw.choice([1, 2, 3, 4]), draw.choice([1, 2, 3])
    module, source = build(draw.choice(POSITIVE)), copies(sequence(SOURCE, sentences, seed=seed), beam)
    padding = copies(PADDING[:sentences], beam, dim=0)
    state = None
    for step in range(6):
        query = sequence(1, source.shape[1], seed=100 * seed + step)
        module.beam_size = beam
        out, state = module(query, state, padding, source=source)
        module.beam_size = 1
        assert relative_error(out, attend(module, query, source, padding)) <= FLOAT32, step
        rows = source.shape[1]
        if draw.random() < 0.5 and rows % beam == 0:  # as beam search does it: sentences leave, hypotheses move
            kept = sorted(draw.sample(range(rows // beam), draw.randint(1, rows // beam)))
            order = [beam * sentence + draw.randrange(beam) for sentence in kept for _ in range(beam)]
        else:
            order = draw.choices(range(rows), k=draw.randint(1, 7))
        index = torch.tensor(order)
        state = module.reorder(state, index)
        source, padding = source[:, index], padding[index]


# ---------------------------------------------------------------------------------- precision


def halved(module, *inputs, dtype):
    """A module and inputs in a half type, and in float32 with exactly the same numbers."""
    low = copy.deepcopy(module).to(dtype)
    inputs = [x.to(dtype) for x in inputs]
    return (low, *inputs), (copy.deepcopy(low).float(), *[x.float() for x in inputs])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("feature_map", POSITIVE)
def test_half_types_are_near_float32(feature_map, dtype):
    low, exact = halved(build(feature_map), *inputs(), dtype=dtype)
    for attention in (attend, one_by_one):
        out = attention(*low)
        assert out.dtype == dtype
        assert relative_error(out, attention(*exact)) <= BFLOAT16
    assert all(grad.isfinite().all() for grad in gradients(low[0], attend(*low)).values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("feature_map", POSITIVE)
def test_the_normaliser_of_a_long_source_is_in_range_and_exact(feature_map, dtype):
    """z . q grows with the source: 160 a position for heads of 128 and ELU + 1, past float16's 65,504 after 400; and
    a sum in bfloat16 would stop growing after 256."""
    module = build(feature_map, embed_dim=128, num_heads=1)
    low, exact = halved(module, sequence(4, 1, 128), sequence(600, 1, 128, seed=2), dtype=dtype)
    for attention in (attend, one_by_one):
        assert relative_error(attention(*low), attention(*exact)) <= BFLOAT16
    assert all(grad.isfinite().all() for grad in gradients(low[0], attend(*low)).values())


# ------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 5}, "num_heads is 5; it must be a divisor of embed_dim, 16"),
        ({"feature_map": "softmax"}, "feature map 'softmax'; .* identity, elu, relu, favor, dpfp, tanh"),
        ({"feature_map": "dpfp", "feature_dim": 17}, "feature_dim is 17; .*dpfp_nu = 16"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_impossible_modules_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_long_queries_and_keys_of_favor_neither_vanish_nor_overflow():
    """Their features are e^-(|x|^2 / 2), and smaller: a training of a translation model ended at NaN over them."""
    module = build("favor", embed_dim=128, num_heads=4, favor_features=64).train()
    for scale in (1.0, 5.0, 8.0, 12.0, 30.0, 1000.0):
        x = (scale * sequence(16, 8, 128)).requires_grad_()
        torch.manual_seed(0)
        out, _ = module(x)
        assert out.abs().mean() > 0.1 * scale * module.out_proj.weight.std()
        gradients = torch.autograd.grad(out.sum(), [x, *module.parameters()])
        assert all(gradient.isfinite().all() for gradient in gradients)
