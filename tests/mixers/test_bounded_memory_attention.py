"""ABC and Linformer are attention to slots; ABC's control has the range and the digits that it needs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fairseq_fastweights.mixers.bounded_memory_attention import ABCMLP, BoundedMemoryAttention, Linformer
from tests.mixers import contract

EMBED, HEADS = 12, 2


def build(kind: type[BoundedMemoryAttention], slots: int = 3, **options: int) -> Any:
    torch.manual_seed(0)
    if kind is Linformer:
        options = {"max_positions": 320, **options}
    return contract.spread(kind(EMBED, HEADS, slots=slots, **options), 0.5, keep=0)


def controls(mixer: BoundedMemoryAttention, x: Tensor, head: int) -> tuple[Tensor, Tensor]:
    """(time, slots): the share of each of these positions in the slots after them, with nothing against overflow."""
    if isinstance(mixer, Linformer):
        return mixer.compress_k.weight.t()[: len(x)], mixer.compress_v.weight.t()[: len(x)]
    alpha = mixer.control_proj(x).chunk(HEADS, dim=-1)[head].exp()
    return alpha / alpha.sum(dim=0), alpha / alpha.sum(dim=0)


def naive(mixer: BoundedMemoryAttention, x: Tensor) -> Tensor:
    """All the memories there are, one position after the other."""
    if not len(x):
        return x
    heads = []
    for head in range(HEADS):
        q, k, v = (each(x).chunk(HEADS, dim=-1)[head] for each in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
        rows = []
        for t in range(len(x)):
            phi, psi = controls(mixer, x[: t + 1], head)
            keys, values = phi.t() @ k[: t + 1], psi.t() @ v[: t + 1]
            rows.append(values.t() @ (keys @ q[t] / math.sqrt(mixer.head_dim)).softmax(0))
        heads.append(torch.stack(rows))
    return mixer.out_proj(torch.cat(heads, dim=-1))


@pytest.mark.parametrize("slots", [1, 3, 40])
@pytest.mark.parametrize("kind", [ABCMLP, Linformer])
def test_it_is_its_definition(kind, slots):
    for time, padding in ((1, "none"), (13, "whole"), (70, "none")):
        x, padding = contract.draw(time, EMBED), contract.paddings(time)[padding]
        contract.check_definition(build(kind, slots), naive, x, padding)


@pytest.mark.parametrize("dtype", [torch.float32, *contract.HALF])
def test_the_control_neither_overflows_nor_vanishes(dtype):
    """Logits from -5,000 to 5,000: exp() of them and sums of that have no place even in float64."""
    mixer, time = build(ABCMLP), 300
    x = contract.draw(time, EMBED)
    x[:, :, :3] += torch.linspace(-5000, 5000, time)[:, None, None] * torch.tensor([1.0, -1.0, 0.0])
    with torch.no_grad():  # these three numbers of the input are the slots' logits, and nothing else
        mixer.control_proj.weight.copy_(torch.eye(3, EMBED).repeat(HEADS, 1))
        for module in (mixer.q_proj, mixer.k_proj, mixer.v_proj):
            module.weight[:, :3] = 0
    mixer, x = mixer.to(dtype), x.to(dtype)
    phi, _, log_kept, after = mixer._controls(x, None, torch.ones(contract.BATCH, time, dtype=torch.bool))
    exact = x[:, :, :3].double()
    log_sum = exact.logcumsumexp(dim=0).transpose(0, 1)
    assert contract.error(phi[:, :, 0].double(), (exact.transpose(0, 1) - log_sum).exp()) <= 1e-6
    assert contract.error(log_kept[:, 1:, 0].double(), log_sum[:, :-1] - log_sum[:, 1:]) <= 1e-6
    assert contract.error(after["log_sum"][:, 1], log_sum[:, -1]) <= 1e-12
    out, _ = mixer(x)
    assert contract.error(out, contract.in_parts(mixer, x, [1, 100, time - 101], None)[0]) <= 2e-2
    loss = 1e-3 * out.float().square().mean()  # or the gradients of weights for inputs of 5,000 leave float16
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(loss, list(mixer.parameters())))


@pytest.mark.parametrize("state", [False, True])
def test_linformer_reads_no_more_positions_than_it_has_learned(state):
    mixer, x = build(Linformer, max_positions=9), contract.draw(10, EMBED)
    padding = torch.zeros(contract.BATCH, 10, dtype=torch.bool)
    padding[:, 3] = True
    before, rest = (mixer(x[:2])[1], slice(2, None)) if state else (None, slice(None))
    mixer(x[rest], before, padding[:, rest])
    padding[1] = False
    for mask in (None, padding[:, rest]):
        with pytest.raises(ValueError, match="x ends at position 10 of a text; max_positions is 9"):
            mixer(x[rest], before, mask)
