"""The promises of `Mixer.forward`, to be held against any mixer; in float64, so that nothing hides in rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_fastweights.mixers.mixer import Mixer, State

BATCH = 3
FLOAT64 = 1e-11  # rounding over sums of some hundred terms; a position too many or too few costs more than 1e-3
HALF = {torch.float16: 5e-3, torch.bfloat16: 4e-2}  # several roundings of half a unit in the last place
Naive = Callable[[Mixer, Tensor], Tensor]
"""The definition: what a mixer gives for (time, embed_dim), one row without padding."""


def alone(mixer: Mixer, x: Tensor) -> Tensor:
    """For `Naive`, where another test holds the mixer against its equations: a row by itself."""
    return mixer(x[:, None])[0][:, 0]


def spread(mixer: Mixer, noise: float = 0.2, keep: float = 1) -> Any:
    """The mixer in float64 and evaluation, with parameters that all matter: none is zero, none are equal."""
    mixer = mixer.double().eval()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.mul_(keep).add_(noise * torch.randn_like(parameter))
    return mixer


def error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return ((actual - expected).double().norm() / (expected.double().norm() or 1)).item()


def assert_gradients(ours: Sequence[Tensor], theirs: Sequence[Tensor], bound: float = FLOAT64) -> None:
    """Some gradients vanish but for rounding, as a softmax's for the bias of its keys: a bound by the largest, too."""
    least = 1e-3 * max(grad.norm() for grad in theirs)
    for mine, its in zip(ours, theirs, strict=True):
        assert (mine - its).norm() <= bound * max(its.norm(), least)


def draw(time: int, width: int, seed: int = 1, batch: int = BATCH) -> Tensor:
    return torch.randn(time, batch, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def paddings(time: int) -> dict[str, Tensor | None]:
    """None, and padding on both sides, within, everywhere in a row, and in a step that no row reads."""
    within = torch.zeros(BATCH, time, dtype=torch.bool)
    within[0, : time // 3] = within[0, -2:] = True
    within[1, 1::3] = True
    within[:, time // 2] = True
    whole = within.clone()
    whole[2] = True
    return {"none": None, "within": within, "whole": whole}


def in_parts(
    mixer: Mixer, x: Tensor, lengths: list[int], padding: Tensor | None, state: State | None = None, **how: bool
) -> tuple[Tensor, State]:
    outs, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        mask = None if padding is None else padding[:, part]
        # As fairseq's decoder does: no mask where nothing in the part is padding.
        out, state = mixer(x[part], state, None if mask is None or not mask.any() else mask, **how)
        outs.append(out)
        start += length
    assert start == x.shape[0] and state is not None
    return torch.cat(outs), state


def check_definition(mixer: Mixer, naive: Naive, x: Tensor, padding: Tensor | None, bound: float = FLOAT64) -> None:
    """Outputs, and gradients of the input and of every parameter, are those of the definition, row by row."""
    real = torch.ones(x.shape[:2], dtype=torch.bool) if padding is None else ~padding.t()
    x = x.clone().requires_grad_()
    out = mixer(x, None, padding)[0]
    assert out.isfinite().all()
    rows = [naive(mixer, x[real[:, b], b]) for b in range(x.shape[1])]
    weights = draw(*out.shape[::2], seed=2)
    wanted = [x, *mixer.parameters()]
    for b, row in enumerate(rows):
        assert error(out[real[:, b], b], row) <= bound
    theirs = sum((row * weights[real[:, b], b]).sum() for b, row in enumerate(rows))
    assert_gradients(*(torch.autograd.grad(loss, wanted) for loss in ((out * weights)[real].sum(), theirs)), bound)


def check_parts(mixer: Mixer, x: Tensor, padding: Tensor | None) -> None:
    """Segments and steps, also those that overwrite the state, give what the whole gives, and end in its state.

    Which is, of each row, the one that its real positions alone end in.
    """
    time = x.shape[0]
    room = max(0, getattr(mixer, "max_positions", time + 3) - time)
    real = torch.ones(x.shape[:2], dtype=torch.bool) if padding is None else ~padding.t()
    with torch.no_grad():
        whole, end = mixer(x, None, padding)
        more = draw(3, x.shape[2], seed=5)[:room]
        for b in range(x.shape[1]) if padding is not None else ():
            _, state = mixer(x[real[:, b], b : b + 1])
            assert error(mixer(more, end)[0][:, b], mixer(more[:, b : b + 1], state)[0][:, 0]) <= FLOAT64
        for lengths in ([1] * time, [time // 2, 1, time - time // 2 - 1], [2, time - 2]):
            for overwrite in (False, True):
                out, state = in_parts(mixer, x, lengths, padding, overwrite=overwrite)
                assert error(out[real], whole[real]) <= FLOAT64
                kinds = [{n: (s.dtype, len(s)) for n, s in each.items()} for each in (state, end)]
                assert kinds[0] == kinds[1]
                # What the states hold alike may be written in two ways: they are alike where they lead on alike.
                assert error(mixer(more, state)[0], mixer(more, end)[0]) <= FLOAT64


def check_gradients_through_the_state(mixer: Mixer, x: Tensor) -> None:
    """Also where the state may be overwritten: a gradient needs it as it was."""
    parameters = list(mixer.parameters())
    whole = torch.autograd.grad(mixer(x)[0].square().sum(), parameters)
    for overwrite in (False, True):
        out, _ = in_parts(mixer, x, [2, x.shape[0] - 2], None, overwrite=overwrite)
        assert_gradients(torch.autograd.grad(out.square().sum(), parameters), whole)


def check_state(mixer: Mixer, x: Tensor, starts_at_zero: bool = True) -> None:
    """Its rows can be taken in any order; without overwrite it stays as it was; zeros are the state at the start."""
    first, rest = x.split([4, x.shape[0] - 4])
    with torch.no_grad():
        state = mixer(first)[1]
        kept = {name: tensor.clone() for name, tensor in state.items()}
        for order in ([2, 0, 1], [1, 1, 1], [0, 1], [0, 0, 1, 1, 2, 2]):
            whole = mixer(x[:, order])[0]
            assert error(mixer(rest[:, order], mixer.reorder(state, torch.tensor(order)))[0], whole[4:]) <= FLOAT64
        assert all(torch.equal(state[name], kept[name]) for name in kept)
        assert mixer.reorder(state, torch.arange(BATCH)) is state
        if not starts_at_zero:
            return

        new = {name: tensor.clone() for name, tensor in state.items()}
        for tensor in new.values():
            tensor[1] = 0
        out = mixer(rest, new)[0]
        assert error(out[:, 1], mixer(rest[:, 1:2])[0][:, 0]) <= FLOAT64
        assert error(out[:, 0], mixer(x[:, :1])[0][4:, 0]) <= FLOAT64
        assert error(out[:, 1], mixer(x[:, 1:2])[0][4:, 0]) > 1e-3


def check_half(mixer: Mixer, naive: Naive, x: Tensor, dtype: torch.dtype) -> None:
    """In a half type it stays near the definition for the same rounded numbers, gradients too; and in parts."""
    x, mixer = x.to(dtype), mixer.to(dtype)
    out, _ = mixer(x)
    assert out.dtype == dtype
    grads = torch.autograd.grad(out.float().square().mean(), list(mixer.parameters()))
    assert all(grad.isfinite().all() for grad in grads)
    with torch.no_grad():
        parts, _ = in_parts(mixer, x, [1, 1, x.shape[0] - 2], None, overwrite=True)
        expected = torch.stack([naive(mixer.double(), x[:, b].double()) for b in range(x.shape[1])], dim=1)
    assert max(error(out, expected), error(parts, expected)) <= HALF[dtype]
