"""The compiled kernels for key and value dimensions beyond `native.LARGEST_DIM`: a call divided into several.

The columns of a state, one for each value, have nothing to do with one another in any rule. Its rows, one for each key,
have nothing to do with one another in the diagonal rules (sum, gated, decay), where y_t = S_t q_t adds up what they
give. The delta rule's do: v_t - S_{t-1} k_t, which it writes, is a sum over all of them. So it is divided by values
alone, and `native.require` refuses larger keys.

Parts are views: the kernels read inputs, and change the state of a step, where they lie; the parts of a state before a
sequence they copy. In 16 bits there is more rounding: `out` of each part of the keys comes in the dtype of `v`, and so
does each part's gradient of what parts share (those of values: q, k, logs of key decays, gates, write strengths; those
of keys: v, logs of value decays, gates). Two parts take the error of such a result, where it is of rounding alone, from
0.17% to 0.25% in bfloat16 and from 0.02% to 0.03% in float16. With more parts that of `out` stays so, as it is added up
in the states' dtype; that of the gradients, which autograd adds up one after the other in their own, grows: nine parts
make 0.42% in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fairseq_fastweights.ops import native
from fairseq_fastweights.ops.checks import state_dtype

KEYS, VALUES = 2, 3
"""The dimensions of a state, (batch, heads, key_dim, value_dim), that a call can be divided over."""
_ALONG = (KEYS, KEYS, VALUES, KEYS, VALUES)
"""What the last dimension of q, k, v and the logs of decays is; gates and write strengths have no such dimension."""
_MULTIPLE = 16
"""Parts begin at multiples of this, where rows of any dtype are aligned as those of the whole are."""

Inputs = tuple[Tensor | None, ...]


def sum_rule(q: Tensor, k: Tensor, v: Tensor, *, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `native.sum_rule`, with keys and values of any dimensions."""
    return _rule(native.sum_rule, (VALUES, KEYS), (q, k, v), initial_state)


def gated_rule(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, *, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `native.gated_rule`, with keys and values of any dimensions."""
    return _rule(native.gated_rule, (VALUES, KEYS), (q, k, v, log_gate), initial_state)


def decay_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_key_decay: Tensor | None,
    log_value_decay: Tensor | None,
    *,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `native.decay_rule`, with keys and values of any dimensions."""
    return _rule(native.decay_rule, (VALUES, KEYS), (q, k, v, log_key_decay, log_value_decay), initial_state)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `native.delta_rule`, with values of any dimension."""
    return _rule(native.delta_rule, (VALUES,), (q, k, v, beta), initial_state)


def sum_step_(q: Tensor, k: Tensor, v: Tensor, *, state: Tensor) -> Tensor:
    """One step of `sum_rule`, on a state that is changed where it lies."""
    return _step_(native.sum_step_, (VALUES, KEYS), (q, k, v), state)


def gated_step_(q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, *, state: Tensor) -> Tensor:
    """One step of `gated_rule`, on a state that is changed where it lies."""
    return _step_(native.gated_step_, (VALUES, KEYS), (q, k, v, log_gate), state)


def decay_step_(
    q: Tensor, k: Tensor, v: Tensor, log_key_decay: Tensor | None, log_value_decay: Tensor | None, *, state: Tensor
) -> Tensor:
    """One step of `decay_rule`, on a state that is changed where it lies."""
    return _step_(native.decay_step_, (VALUES, KEYS), (q, k, v, log_key_decay, log_value_decay), state)


def delta_step_(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, state: Tensor) -> Tensor:
    """One step of `delta_rule`, on a state that is changed where it lies."""
    return _step_(native.delta_step_, (VALUES,), (q, k, v, beta), state)


def _rule(
    run: Callable[..., tuple[Tensor, Tensor]], dims: tuple[int, ...], inputs: Inputs, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`run`, a rule of `native`, on parts along the first of `dims`, each of them on parts along the others."""
    if not dims:
        return run(*inputs, initial_state=initial_state)
    dim, *others = dims
    parts = [_rule(run, tuple(others), part, state) for part, state in _parts(dim, inputs, initial_state)]
    final_states = [final_state for _, final_state in parts]
    final_state = torch.cat(final_states, dim) if len(parts) > 1 else final_states[0]
    return _whole_out(dim, [out for out, _ in parts]), final_state


def _step_(run: Callable[..., Tensor], dims: tuple[int, ...], inputs: Inputs, state: Tensor) -> Tensor:
    """`run`, a step of `native`, likewise: each part changes its part of the state."""
    if not dims:
        return run(*inputs, state=state)
    dim, *others = dims
    return _whole_out(dim, [_step_(run, tuple(others), *part) for part in _parts(dim, inputs, state)])


def _parts(dim: int, inputs: Inputs, state: Tensor | None) -> Iterator[tuple[Inputs, Any]]:
    """Inputs and a state in as few parts along `dim` as the kernels take, and these as even as `_MULTIPLE` lets them.

    `Tensor.split` makes them, as its backward pass is one concatenation; that of slices would add up as many tensors of
    the whole's size, zeros but for a part.
    """
    whole = inputs[_ALONG.index(dim)]
    assert whole is not None
    size = whole.shape[-1]
    count = _ceil(size, native.LARGEST_DIM[whole.device.type])
    if count == 1:
        return iter([(inputs, state)])
    part = _MULTIPLE * _ceil(_ceil(size, count), _MULTIPLE)
    pieces = [
        x.split(part, -1) if x is not None and x.dim() == 4 and along == dim else (x,) * count
        for x, along in zip(inputs, _ALONG, strict=False)
    ]
    states = (None,) * count if state is None else state.split(part, dim)
    return zip(zip(*pieces, strict=True), states, strict=True)


def _whole_out(dim: int, parts: list[Tensor]) -> Tensor:
    """The outputs of parts along `dim` as one: those of values side by side, those of keys added up."""
    first, *others = parts
    if not others:
        return first
    if dim == VALUES:
        return torch.cat(parts, -1)
    return sum(others, first.to(state_dtype(first.dtype))).to(first.dtype)


def _ceil(count: int, size: int) -> int:
    return -(-count // size)
