"""Transformer-XL's attention is its equations segment after segment, and far into a text."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from fairseq_fastweights.mixers.transformer_xl import TransformerXL
from tests.mixers import contract
from tests.mixers.test_equations import transformer_xl

EMBED, HEADS = 12, 2


def build(memory: int, embed: int = EMBED, heads: int = HEADS, **options) -> TransformerXL:
    torch.manual_seed(0)
    return contract.spread(TransformerXL(embed, heads, memory=memory, **options), 0.5, keep=0)


@pytest.mark.parametrize("padding", ["none", "whole"])
@pytest.mark.parametrize(
    "options",
    [*({"memory": n} for n in (0, 3, 5, 7, 40)), {"memory": 4, "same_length": True}, {"memory": 7, "clamp_len": 6}],
)
def test_segments_see_the_memory_and_no_gradient_enters_it(options, padding):
    """Memories of no, fewer, as many and more positions than the segments have."""
    mixer, lengths = build(**options), [5, 5, 1, 1, 4]
    x, padding = contract.draw(sum(lengths), EMBED).requires_grad_(), contract.paddings(sum(lengths))[padding]
    real = torch.ones(x.shape[:2], dtype=torch.bool) if padding is None else ~padding.t()
    out, state = contract.in_parts(mixer, x, lengths, padding)
    assert not state["memory"].requires_grad
    expected = torch.zeros_like(out)
    for b in range(contract.BATCH):
        past, start = x[:0, b], 0
        for length in lengths:
            places = torch.arange(start, start + length)[real[start : start + length, b]]
            expected = expected.index_put((places, torch.tensor(b)), transformer_xl(mixer, x[places, b], past))
            past = torch.cat([past, x[places, b]])
            past, start = past[max(0, len(past) - mixer.memory) :], start + length
        assert state["filled"][b] == len(past)
        assert torch.equal(state["memory"][b, mixer.memory - len(past) :], past)
    assert contract.error(out[real], expected[real]) <= contract.FLOAT64
    weights = contract.draw(len(x), EMBED, seed=2)
    wanted = [x, *mixer.parameters()]
    contract.assert_gradients(*(torch.autograd.grad((y * weights)[real].sum(), wanted) for y in (out, expected)))


@pytest.mark.parametrize(("trained", "evaluated"), [(4, 9), (9, 4), (4, 0)])
def test_another_memory_takes_the_same_weights_and_a_state_of_the_first(trained, evaluated):
    x, first, second = contract.draw(12, EMBED), build(trained), build(evaluated)
    second.load_state_dict(first.state_dict())
    assert second.settings() == first.settings()
    _, state = first(x[:4])
    out, state = second(x[4:8], state)
    last, _ = second(x[8:], state)
    for b in range(contract.BATCH):
        assert contract.error(out[:, b], transformer_xl(second, x[4:8, b], x[:4, b])) <= contract.FLOAT64
        assert (
            contract.error(last[:, b], transformer_xl(second, x[8:, b], x[max(0, 8 - evaluated) : 8, b]))
            <= contract.FLOAT64
        )


@pytest.mark.parametrize("dtype", contract.HALF)
def test_half_precision(dtype):
    """Past a distance of 256, from where bfloat16 has only every second number."""
    contract.check_half(build(300), contract.alone, contract.draw(300, EMBED), dtype)


def test_pairs_of_positions_have_a_score_and_no_vector():
    mixer, x, sizes = build(50), contract.draw(50, EMBED), []
    state = mixer(x)[1]
    with saved_tensors_hooks(lambda kept: sizes.append(kept.untyped_storage().nbytes()), lambda _: 0):
        mixer(x, state)
    assert max(sizes) <= 8 * contract.BATCH * HEADS * 50 * 101
