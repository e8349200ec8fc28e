"""The compiled kernels for key and value dimensions beyond `native.LARGEST_DIM`: a call divided into several.

The columns of a state, one for each value, have nothing to do with one another in any rule. Its rows, one for each key,
have nothing to do with one another in the diagonal rules (sum, gated, decay), where y_t = S_t q_t adds up what they
give. Those of rules that correct do: v_t - S_{t-1} k_t, which the delta rule writes, is a sum over all of them. So
these are divided by values alone, and larger keys are refused.

Parts are views: the kernels read inputs, and change the state of a step, where they lie; the parts of a state before a
sequence they copy. In 16 bits there is more rounding: `out` of each part of the keys comes in the dtype of `v`, and so
does each part's gradient of what parts share (those of values: q, k, logs of key decays, gates, write strengths; those
of keys: v, logs of value decays, gates). Two parts take the error of such a result, where it is of rounding alone, from
0.17% to 0.25% in bfloat16 and from 0.02% to 0.03% in float16. With more parts that of `out` stays so, as it is added up
in the states' dtype; that of the gradients, which autograd adds up one after the other in their own, grows: nine parts
make 0.42% in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from fairseq_fastweights.ops import native
from fairseq_fastweights.ops.checks import state_dtype
from fairseq_fastweights.ops.native import Kernel

KEYS, VALUES = 2, 3
"""The dimensions of a state, (batch, heads, key_dim, value_dim), that a call can be divided over."""
_MULTIPLE = 16
"""Parts begin at multiples of this, where rows of any dtype are aligned as those of the whole are."""

Inputs = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Divided:
    """A kernel that takes keys and values of any dimension.

    Attributes:
        kernel: that of a part.
        dims: the dimensions of a state, of `KEYS` and `VALUES`, that calls are divided over, the outer first.
        along: of each input which of these its last dimension is; None for gates that have a number for each head.
    """

    kernel: Kernel
    dims: tuple[int, ...]
    along: tuple[int | None, ...]

    def sequence(
        self, *inputs: Tensor | None, initial_state: Tensor | None = None, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Computes what `Kernel.sequence` does on parts along the first of `dims`, each on parts along the others."""
        if not self.dims:
            return self.kernel.sequence(*cast(Any, inputs), initial_state=initial_state, starts=starts)
        (dim, *_), inner = self.dims, replace(self, dims=self.dims[1:])
        parts = [
            inner.sequence(*part, initial_state=state, starts=starts)
            for part, state in self._parts(inputs, initial_state)
        ]
        final_states = [final_state for _, final_state in parts]
        final_state = torch.cat(final_states, dim) if len(parts) > 1 else final_states[0]
        return _whole_out(dim, [out for out, _ in parts]), final_state

    def step_(self, *inputs: Tensor | None, state: Tensor, starts: Tensor | None = None) -> Tensor:
        """Computes what `Kernel.step_` does; each part changes its part of the state."""
        if not self.dims:
            return self.kernel.step_(*cast(Any, inputs), state=state, starts=starts)
        (dim, *_), inner = self.dims, replace(self, dims=self.dims[1:])
        parts = self._parts(inputs, state)
        return _whole_out(dim, [inner.step_(*part, state=of_part, starts=starts) for part, of_part in parts])

    def _parts(self, inputs: Inputs, state: Tensor | None) -> Iterator[tuple[Inputs, Any]]:
        """Inputs and a state in as few parts as the kernels take, and these as even as `_MULTIPLE` lets them.

        `Tensor.split` makes them, as its backward pass is one concatenation; that of slices would add up as many
        tensors of the whole's size, zeros but for a part.
        """
        dim = self.dims[0]
        whole = inputs[self.along.index(dim)]
        assert whole is not None
        size = whole.shape[-1]
        count = _ceil(size, native.LARGEST_DIM[whole.device.type])
        if count == 1:
            return iter([(inputs, state)])
        part = _MULTIPLE * _ceil(_ceil(size, count), _MULTIPLE)
        pieces = [
            x.split(part, -1) if x is not None and along == dim else (x,) * count
            for x, along in zip(inputs, self.along, strict=True)
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
