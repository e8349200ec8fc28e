"""Softmax attention far into a text and in generation, and the parameters of all mixers with a softmax."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from fairseq.modules import MultiheadAttention

from fairseq_fastweights.mixers.bounded_memory_attention import ABCMLP, Linformer
from fairseq_fastweights.mixers.local_attention import LocalAttention
from fairseq_fastweights.mixers.softmax_attention import SoftmaxAttention
from fairseq_fastweights.mixers.transformer_xl import TransformerXL
from tests.mixers import contract
from tests.mixers.contract import error

EMBED, HEADS = 24, 2  # heads of 12 dimensions
BIASES = ("content_bias", "position_bias")
ANGLES = 1e-6  # rounding of angles in float32


def build(rotary_dim: int, **options: float) -> SoftmaxAttention:
    torch.manual_seed(0)
    return contract.spread(SoftmaxAttention(EMBED, HEADS, rotary_dim=rotary_dim, **options), 0.4, keep=0)


@pytest.mark.parametrize(
    ("kind", "options", "others", "gain"),
    [
        (SoftmaxAttention, {}, {}, 1),
        (LocalAttention, {}, {}, 1),
        (ABCMLP, {}, {"control_proj.weight": (HEADS * 32, EMBED)}, 1),
        (Linformer, {"max_positions": 9}, {f"compress_{x}.weight": (64, 9) for x in "kv"}, 2**-0.5),
        (TransformerXL, {"bias": True}, {"position_proj.weight": (24, 24), **dict.fromkeys(BIASES, (HEADS, 12))}, 1),
    ],
)
def test_parameters_have_fairseqs_names_and_initial_values(kind, options, others, gain):
    """Concerns all mixers that read by a softmax."""
    modules = kind(EMBED, HEADS, **options), MultiheadAttention(EMBED, HEADS, self_attention=True)
    for module in modules:
        torch.manual_seed(3)
        module.reset_parameters()
    ours, theirs = (module.state_dict() for module in modules)
    own = {name: ours.pop(name) for name in others}
    assert {name: x.shape for name, x in ours.items()} == {name: x.shape for name, x in theirs.items()}
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items() if "weight" in name or "out_proj" in name)
    for name, x in own.items():
        assert x.shape == others[name]
        if name.endswith("weight"):  # 576 numbers come within 5 % of the bound, but for a chance of 1e-13
            assert x.abs().max().item() == pytest.approx(gain * math.sqrt(6 / sum(x.shape)), rel=0.05)
        else:
            assert 0.01 < x.std() < 0.03


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 5e-3), (torch.bfloat16, 3e-2)])
def test_half_precision_far_into_a_text(dtype, bound):
    """Angles are float32: with positions in bfloat16 those from 300 on would be off by whole radians."""
    module, x = build(12).float(), contract.draw(600, EMBED)
    expected = module(x.to(dtype).float())[0]
    assert error(module.to(dtype)(x.to(dtype))[0].float(), expected) <= bound


@torch.no_grad()
def test_a_document_is_the_same_however_late_it_starts():
    """Angles at 100,000 are rounded in float32 by 1e-3; their differences are not to be."""
    module, x = build(EMBED // HEADS).float(), torch.randn(6, 1, EMBED)
    before = dict.fromkeys(("keys", "values"), torch.zeros(1, HEADS, 100_000, EMBED // HEADS))
    late, _ = module(x, before, starts=torch.tensor([[True] + 5 * [False]]))
    assert error(late, module(x)[0]) < 10 * ANGLES


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@torch.no_grad()
def test_a_step_of_generation_copies_no_keys(kv_heads):
    """And gives what the whole text gives: after two steps there is room for more, until it is used up."""
    torch.manual_seed(0)
    module, x = SoftmaxAttention(EMBED, 6, kv_heads=kv_heads, rotary_dim=2).eval(), torch.randn(150, 2, EMBED)
    whole, _ = module(x)
    out, state = module(x[:3])
    outs, places = [out], []
    for t in range(3, len(x)):
        out, state = module(x[t : t + 1], state, overwrite=True)
        outs.append(out)
        places.append(state["keys"].data_ptr())
        assert state["keys"].shape[2] == t + 1
    assert error(torch.cat(outs), whole) <= ANGLES
    assert len(set(places)) <= 4


@torch.no_grad()
def test_states_stay_as_they_are_unless_they_may_be_overwritten():
    module, x = build(4).eval(), contract.draw(12, EMBED)
    _, state = module(x[:4])
    for t in (4, 5):
        _, state = module(x[t : t + 1], state, overwrite=True)
    before, copied = {name: tensor.clone() for name, tensor in state.items()}, copy.deepcopy(state)
    selected = module.reorder(state, torch.tensor([2, 0, 1]))
    for one, other in ((state, copied), (state, selected), (copied, state)):
        _, first = module(x[6:7], one)
        after = {name: tensor.clone() for name, tensor in first.items()}
        module(x[8:9], one)  # twice from the same state
        module(x[7:8], other, overwrite=True)
        assert all(torch.equal(first[name], tensor) for name, tensor in after.items())
        assert all(torch.equal(one[name], tensor) for name, tensor in before.items())
    expected, _ = module(x[6:7, [2, 0, 1]], selected)
    assert error(expected, module(x[6:7], state)[0][:, [2, 0, 1]]) <= ANGLES
