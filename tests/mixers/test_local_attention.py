"""Local attention is softmax attention to a window, whole or in parts, with padding, in every precision."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_fastweights.mixers.local_attention import SMALLEST_BLOCK, LocalAttention
from tests.mixers import contract

EMBED, HEADS = 12, 2

# One block; a part of a second; several, the last full; windows of one, within a block, as large, of several blocks, of
# blocks that are larger for it, and larger than the text.
SIZES = [
    (1, 1),
    (7, 1),
    (7, 3),
    (7, 7),
    (9, 40),
    (33, 1),
    (33, 2),
    (64, 32),
    (65, 33),
    (100, 34),
    (121, 70),
    (200, 138),
]
sizes = pytest.mark.parametrize(("time", "window"), SIZES)


def build(window: int, seed: int = 0, **options) -> LocalAttention:
    torch.manual_seed(seed)
    mixer = LocalAttention(EMBED, HEADS, window=window, **options).double().eval()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_(std=0.5)
    return mixer


def naive(mixer: LocalAttention, x: Tensor) -> Tensor:
    """One position after the other."""
    rows = []
    for t in range(x.shape[0]):
        seen = x[max(0, t - mixer.window + 1) : t + 1]
        heads = []
        for q, k, v in zip(
            *(each.chunk(HEADS, dim=-1) for each in (mixer.q_proj(x[t]), mixer.k_proj(seen), mixer.v_proj(seen))),
            strict=True,
        ):
            heads.append((k @ q / math.sqrt(mixer.head_dim)).softmax(0) @ v)
        rows.append(mixer.out_proj(torch.cat(heads)))
    return torch.stack(rows) if rows else x


@sizes
def test_it_is_its_definition(time, window):
    contract.check_definition(build(window), naive, contract.draw(time, EMBED), None)


@pytest.mark.parametrize("padding", ["within", "whole"])
@pytest.mark.parametrize(("time", "window"), [(13, 1), (13, 4), (13, 40), (70, 20), (110, 70)])
def test_padding_takes_no_place_in_the_window(time, window, padding):
    contract.check_definition(build(window), naive, contract.draw(time, EMBED), contract.paddings(time)[padding])


@pytest.mark.parametrize("padding", ["none", "within", "whole"])
@pytest.mark.parametrize(("time", "window"), [(13, 1), (13, 4), (13, 40), (70, 20), (110, 70)])
def test_in_parts_it_is_the_same(time, window, padding):
    contract.check_parts(build(window), contract.draw(time, EMBED), contract.paddings(time)[padding])


@pytest.mark.parametrize("window", [1, 3, 50])
def test_gradients_go_through_the_state(window):
    contract.check_gradients_through_the_state(build(window), contract.draw(9, EMBED))


@pytest.mark.parametrize("window", [3, 50])
def test_the_state_has_rows(window):
    contract.check_state(build(window), contract.draw(9, EMBED))


def test_the_state_does_not_grow():
    """Nor does it keep the text alive that it was taken from."""
    mixer = build(5, bias=False)
    sizes = set()
    for time in (1, 4, 200):
        _, state = mixer(contract.draw(time, EMBED))
        sizes.add(tuple((name, tensor.shape, tensor.untyped_storage().nbytes()) for name, tensor in state.items()))
    assert len(sizes) == 1


@pytest.mark.parametrize("dtype", contract.HALF)
def test_half_precision(dtype):
    contract.check_half(build(32), naive, contract.draw(300, EMBED), dtype)


def test_within_the_window_it_is_a_transformers_attention():
    torch.manual_seed(0)
    mixer, x = build(11), contract.draw(11, EMBED)
    q, k, v = (
        each(x).view(11, contract.BATCH, HEADS, -1).permute(1, 2, 0, 3)
        for each in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    )
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).reshape(x.shape)
    assert contract.error(mixer(x)[0], mixer.out_proj(expected)) <= contract.FLOAT64


def test_work_grows_linearly():
    """By the sizes of what is multiplied: times are no claim that a test can hold."""
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    for time in (10 * SMALLEST_BLOCK, 20 * SMALLEST_BLOCK):
        with (
            FlopCounterMode(display=False) as counter,
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        ):
            build(9)(contract.draw(time, EMBED))
        counts.append(counter.get_total_flops())
    assert counts[1] == 2 * counts[0]


def test_dropout_is_of_training_only():
    mixer, x = build(4, dropout=0.5), contract.draw(40, EMBED)
    assert torch.equal(mixer(x)[0], mixer(x)[0])
    mixer.train()
    assert not torch.equal(mixer(x)[0], mixer(x)[0])


def test_parameters_are_those_of_fairseqs_attention():
    from fairseq.modules import MultiheadAttention

    torch.manual_seed(0)
    theirs = MultiheadAttention(EMBED, HEADS, self_attention=True).state_dict()
    torch.manual_seed(0)
    ours = LocalAttention(EMBED, HEADS).state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not any("bias" in name for name in LocalAttention(EMBED, HEADS, bias=False).state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [({"window": 0}, "window is 0; it must be at least 1"), ({"num_heads": 5}, "num_heads is 5; .*embed_dim, 12")],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        LocalAttention(EMBED, **{"num_heads": HEADS, **options})
    assert LocalAttention(EMBED, HEADS, window=7).settings() == {"window": 7}
