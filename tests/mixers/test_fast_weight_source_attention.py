"""Attention to a source as a whole is Katharopoulos et al. 2020, Eq. 5, for a query or a beam, and without padding."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from fairseq_fastweights.mixers.fast_weight_source_attention import FastWeightSourceAttention
from fairseq_fastweights.mixers.feature_maps import FEATURE_MAPS
from fairseq_fastweights.mixers.mixer import State
from tests.mixers import contract
from tests.mixers.contract import error

SOURCE, TARGET, BATCH, EMBED, HEADS = 11, 5, 3, 16, 2
POSITIVE = [name for name, kind in FEATURE_MAPS.items() if kind.positive]
BOUND = 1e-11  # small sums of features of either sign cost digits; a padded position that is read, more than 1e-2
# One row each: padding on the left, on the right, nowhere.
PADDING = torch.tensor([[1] * 4 + [0] * 7, [0] * 6 + [1] * 5, [0] * 11], dtype=torch.bool)
maps = pytest.mark.parametrize("feature_map", FEATURE_MAPS)


def build(feature_map: str = "elu", **options: Any) -> FastWeightSourceAttention:
    torch.manual_seed(0)
    options = {"embed_dim": EMBED, "num_heads": HEADS, "feature_map": feature_map, **options}
    return FastWeightSourceAttention(**options).double().eval()  # FAVOR+ draws at every call in training


def sequence(time: int, batch: int = BATCH, width: int = EMBED, seed: int = 1) -> Tensor:
    return contract.draw(time, width, seed, batch)


def inputs() -> tuple[Tensor, Tensor]:
    """Queries and a source."""
    return sequence(TARGET), sequence(SOURCE, seed=2)


def attend(module: FastWeightSourceAttention, query: Tensor, source: Tensor, padding: Tensor | None = None) -> Tensor:
    return module(query, None, padding, source=source)[0]


def steps(module, query, source, padding=None) -> tuple[Tensor, State]:
    """As a decoder asks in generation: the outputs, and the memory."""
    outputs, state = [], None
    for q in query.split(1):
        out, state = module(q, state, padding, source=source, overwrite=True)
        outputs.append(out)
    return torch.cat(outputs), state


def gradients(module: nn.Module, out: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    """Gradients of a sum of all outputs with random weights, for the leaves and the parameters."""
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    return torch.autograd.grad((out * weights).sum(), [*leaves, *module.parameters()])


def equation_5(module: FastWeightSourceAttention, query: Tensor, source: Tensor, padding: Tensor | None) -> Tensor:
    """sum_s sim(q, k_s) v_s / sum_s sim(q, k_s), sim = phi(q) . phi(k), over what is no padding."""
    projected = (module.q_proj(query), module.k_proj(source), module.v_proj(source))
    q, k, v = (x.unflatten(-1, (module.num_heads, -1)) for x in projected)
    q, k = module.feature_map(q, k)
    # Added where the sum can be exactly zero (Schlag et al. 2021, Eq. 28).
    eps = 0.0 if type(module.feature_map).__name__ in ("EluMap", "FavorMap") else 1e-5
    rows = []
    for row in range(query.shape[1]):
        real = slice(None) if padding is None else ~padding[row]
        similarities = torch.einsum("thm,shm->ths", q[:, row], k[real, row])
        total = torch.einsum("ths,shv->thv", similarities, v[real, row])
        rows.append((total / (similarities.sum(-1, keepdim=True) + eps)).flatten(1))
    return module.out_proj(module.scale * torch.stack(rows, dim=1))


def assert_it_is_the_equation(module, query, source, padding, bound=BOUND) -> None:
    """At once and step by step, outputs and gradients."""
    exact, high = copy.deepcopy(module).double(), [x.double().requires_grad_() for x in (query, source)]
    expected = equation_5(exact, *high, padding)
    wanted = gradients(exact, expected, *high)
    query, source = query.clone().requires_grad_(), source.clone().requires_grad_()
    whole, (in_steps, state) = attend(module, query, source, padding), steps(module, query, source, padding)
    for out in (whole, in_steps):
        assert error(out, expected) <= bound
        for grad, its in zip(gradients(module, out, query, source), wanted, strict=True):
            assert grad.norm() > 0 and error(grad, its) <= 100 * bound  # that of a division divides twice
    assert error(module(query, state)[0], whole) <= bound  # the source need not be given again


@maps
def test_outputs_and_gradients_are_those_of_the_equation(feature_map):
    query, source = inputs()
    assert_it_is_the_equation(build(feature_map), query, source, None)
    scaled = build(feature_map, scale_read_out=True, bias=False)
    assert scaled.scale == 8**-0.5
    assert_it_is_the_equation(scaled, query, source, None)
    # What stands at padding is large, so that a trace of it would be seen.
    source = sequence(SOURCE, width=24).masked_fill(PADDING.t()[..., None], 50.0)
    assert_it_is_the_equation(build(feature_map, source_dim=24), query, source, PADDING)


def test_words_with_long_keys_do_not_vanish_beside_padding():
    """FAVOR+ divides the features of a row by the largest of them; padding's are up to e^180 times the words' here."""
    module, (query, source) = build("favor").float(), inputs()
    module.k_proj.weight.data.mul_(20)
    source = source.masked_fill(PADDING.t()[..., None], 0.0)  # as an encoder has it: its key is the projection's bias
    assert_it_is_the_equation(module, query.float(), source.float(), PADDING, bound=1e-5)


def test_parameters_are_fairseqs_and_without_a_source_it_reads_the_queries():
    module, (_, source) = build(), inputs()
    assert torch.equal(module(source, padding=PADDING)[0], attend(module, source, source, PADDING))
    theirs = MultiheadAttention(EMBED, HEADS, kdim=24, vdim=24, encoder_decoder_attention=True)
    shapes = [{name: x.shape for name, x in m.state_dict().items()} for m in (build(source_dim=24), theirs)]
    assert shapes[0] == shapes[1]


def test_batch_first_transposes_queries_and_source_and_names_exchanges():
    module, first, (query, source) = build(), build(batch_first=True), inputs()
    out, state = module(query, None, PADDING, source=source)
    flipped, its = first(query.transpose(0, 1), None, PADDING, source=source.transpose(0, 1))
    assert torch.equal(flipped.transpose(0, 1), out) and all(torch.equal(its[name], state[name]) for name in state)
    assert torch.equal(first(query.transpose(0, 1), its)[0], flipped)
    assert torch.equal(first(source.transpose(0, 1))[0].transpose(0, 1), module(source)[0])
    cure = r"read as \(time, batch, embed_dim\); if it is \(batch, time, embed_dim\), give .* batch_first=True$"
    for arguments, message in (
        (
            {"state": state},
            rf"^state\['z'\] has 3 rows; they must be the sources of a batch of 5: x has shape .*{cure}",
        ),
        ({"source": source}, rf"^source has a batch of 3; it must be 5, that of x: .*{cure}"),
        ({"source": source.transpose(0, 1)[:, :5], "padding": PADDING}, rf"^padding has .* must be \(5, 3\), .*{cure}"),
    ):
        with pytest.raises(ValueError, match=message):
            module(query.transpose(0, 1), **arguments)


@pytest.mark.parametrize("options", [{"feature_map": "favor", "favor_features": 192}, {"feature_map": "dpfp"}])
def test_memories_have_the_papers_sizes_and_neither_grow_nor_change(options):
    """Schlag et al. 2021, Table 6, for heads of 64."""
    module, x = build(embed_dim=128, dpfp_nu=3, **options), sequence(3, 1, 128)
    _, state = module(x)
    expected = {"state": (1, 2, 384, 64), "z": (1, 2, 384), "copies": (1,)}
    assert {name: tuple(x.shape) for name, x in state.items()} == expected
    kept = {name: x.clone() for name, x in state.items()}
    _, after = module(x, state, overwrite=True)
    assert all(torch.equal(each[name], kept[name]) for name in kept for each in (state, after))


@maps
def test_a_source_of_nothing_but_padding_is_finite(feature_map):
    module, (query, source) = build(feature_map), (x.requires_grad_() for x in inputs())
    padding = PADDING.clone()
    padding[0] = True
    out, state = module(query, None, padding, source=source)
    assert out.isfinite().all() and torch.equal(out[:, 0], module.out_proj.bias.expand(TARGET, -1))
    assert not state["state"][0].any() and not state["z"][0].any()
    grads = gradients(module, out, query, source)
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[1][padding.t()].any() and grads[1][~padding.t()].all()


@torch.no_grad()
@pytest.mark.parametrize("beam", [1, 2])
@pytest.mark.parametrize(("time", "source_time", "batch"), [(0, SOURCE, 2), (TARGET, 0, 2), (TARGET, SOURCE, 0)])
def test_nothing_comes_of_nothing(time, source_time, batch, beam):
    module, query, source = build(), sequence(time, batch), sequence(source_time, batch)
    module.beam_size = beam
    for padding in (None, torch.ones(batch, source_time, dtype=torch.bool)):
        out, state = module(query, None, padding, source=source)
        for each in (out, module(query, module.reorder(state, torch.arange(batch)), padding, source=source)[0]):
            assert each.shape == query.shape and each.isfinite().all()


def copies(x: Tensor, beam: int, dim: int = 1) -> Tensor:
    """Every row `beam` times in a row, as beam search has the encoder's output."""
    return x.repeat_interleave(beam, dim=dim)


NEARLY = copies(sequence(SOURCE, 2, seed=2), 2)
NEARLY[3, 3, 5] += 1e-3  # of the second group's second row


@torch.no_grad()
@pytest.mark.parametrize(
    ("source", "beam", "padding", "rows"),
    [
        (copies(inputs()[1], 2), 2, None, BATCH),
        (copies(inputs()[1], 4), 4, copies(PADDING, 4, dim=0), BATCH),
        # A beam size may be that of a search before this one: sources are compared, not believed.
        *((sequence(SOURCE, batch, seed=2), beam, None, batch) for batch, beam in ((4, 2), (4, 4), (3, 2))),
        (sequence(SOURCE, 3, seed=2), 3, PADDING, 3),
        (copies(sequence(SOURCE, 1, seed=2), 3), 3, PADDING, 3),  # copies that are padded differently
        (NEARLY, 2, None, 4),  # one group of several that is not of copies
    ],
)
def test_a_beam_shares_one_memory_and_different_sources_none(source, beam, padding, rows):
    for feature_map in POSITIVE:
        module, query = build(feature_map), sequence(TARGET, source.shape[1])
        expected, unshared = module(query, None, padding, source=source)
        assert len(unshared["z"]) == source.shape[1], "nobody has said that there are beams"
        module.beam_size = beam
        for out, shared in (steps(module, query, source, padding), module(query, None, padding, source=source)):
            assert len(shared["z"]) == rows and error(out, expected) <= BOUND


def test_where_gradients_are_wanted_rows_are_not_compared():
    module, source = build(), copies(inputs()[1], 2).requires_grad_()
    module.beam_size = 2  # of a search, to validate, in the middle of a training
    out, state = module(sequence(TARGET, BATCH * 2), source=source)
    assert len(state["z"]) == BATCH * 2
    assert gradients(module, out, source)[0].all()


@torch.no_grad()
@pytest.mark.parametrize("seed", range(20))
def test_memories_follow_any_sequence_of_orders(seed):
    draw = random.Random(seed)
    beam, sentences = draw.randint(1, 4), draw.randint(1, 3)
    module, source = build(draw.choice(POSITIVE)), copies(sequence(SOURCE, sentences, seed=seed), beam)
    padding, state = copies(PADDING[:sentences], beam, dim=0), None
    for step in range(6):
        query = sequence(1, source.shape[1], seed=100 * seed + step)
        module.beam_size = beam
        out, state = module(query, state, padding, source=source)
        module.beam_size = 1
        assert error(out, attend(module, query, source, padding)) <= BOUND, step
        rows = source.shape[1]
        if draw.random() < 0.5 and rows % beam == 0:  # as beam search does it: sentences leave, hypotheses move
            kept = sorted(draw.sample(range(rows // beam), draw.randint(1, rows // beam)))
            order = [beam * sentence + draw.randrange(beam) for sentence in kept for _ in range(beam)]
        else:
            order = draw.choices(range(rows), k=draw.randint(1, 7))
        state, source, padding = module.reorder(state, torch.tensor(order)), source[:, order], padding[order]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("feature_map", POSITIVE)
def test_half_types_are_near_float32_also_of_a_long_source(feature_map, dtype):
    """z . q grows by 160 a position, past float16's 65,504; and a sum in bfloat16 would stop growing after 256."""
    for width, heads, time in ((EMBED, HEADS, SOURCE), (128, 1, 600)):
        low = build(feature_map, embed_dim=width, num_heads=heads).to(dtype)
        query, source = (x.to(dtype) for x in (sequence(4, 1, width), sequence(time, 1, width, seed=2)))
        expected = attend(copy.deepcopy(low).double(), query.double(), source.double())
        for out in (attend(low, query, source), steps(low, query, source)[0]):
            assert out.dtype == dtype and error(out, expected) <= 2e-2  # five roundings, of 2e-3 in bfloat16
            assert all(grad.isfinite().all() for grad in gradients(low, out))
