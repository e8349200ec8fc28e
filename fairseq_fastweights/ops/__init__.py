"""The update rules as pure functions of tensors. All are cases of one recurrence, `fast_weight_rule`.

Sequences are (batch, time, heads, dim), states (batch, heads, key_dim, value_dim). Every operation returns
``(out, final_state)``: `out` is (batch, time, heads, value_dim) in the dtype of `v`, states are float32 (float64 for
float64 inputs). Any strides will do as long as the last dimension of q, k and v is contiguous.

`backend` is "reference" (one step at a time: the definition), "chunkwise" (chunk-parallel PyTorch), "native"
(compiled kernels) or "auto" (`chosen_backend`: native where it was built). A backend that cannot do what is asked
raises `BackendUnavailable`; none silently takes another's place. All have backward passes; forward-mode derivatives
(`torch.func.jvp`) only "reference" has.

`starts` marks the first steps of documents that follow one another in a row: the state is emptied before each, and no
gradient passes. If v has more heads than q and k, as many of its heads in turn share one of theirs.

With `in_place` the final state is written into `initial_state`, which is returned as the final state: generation, one
token at a time, then moves no more than the state. Nothing of such a call can be differentiated. A state that shares
memory with an input, or some of whose elements share memory, is refused.

`selective_scan`, the recurrence of Mamba, is no update rule: it has no queries and keys, but the same three forms.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from fairseq_fastweights.ops.checks import BackendUnavailable, Gate, check_values, state_dtype
from fairseq_fastweights.ops.choice import BACKENDS
from fairseq_fastweights.ops.operations import RULES, Rule
from fairseq_fastweights.ops.scan import selective_scan

__all__ = [
    "BACKENDS",
    "RULES",
    "BackendUnavailable",
    "Gate",
    "Rule",
    "check_values",
    "chosen_backend",
    "decay_rule",
    "delta_rule",
    "fast_weight_rule",
    "gated_delta_rule",
    "gated_rule",
    "selective_scan",
    "state_dtype",
    "sum_rule",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def sum_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    initial_state: Tensor | None = None,
    starts: Tensor | None = None,
    in_place: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Adds every value under its key: S_t = S_{t-1} + v_t k_t^T, y_t = S_t q_t (Schlag et al. 2021, Eq. 10-11, 17).

    Args:
        q: (batch, time, key_heads, key_dim), queries, already through the feature map and normalised.
        k: (batch, time, key_heads, key_dim), keys, as `q`.
        v: (batch, time, heads, value_dim), values; `heads` is a multiple of `key_heads`, and as many heads in turn
            share a head of queries and keys.
        initial_state: (batch, heads, key_dim, value_dim), float32 (float64 for inputs in float64); None for zeros.
        starts: (batch, time), bool: true where a document begins, before which the state is emptied. None for no such
            step.
        in_place: whether the final state is written where `initial_state` lies, as in generation. Nothing of such a
            call can be differentiated.
        backend: "auto", "reference", "chunkwise" or "native", as `BACKENDS` has them.

    Returns:
        out (batch, time, heads, value_dim), in the dtype of `v`, and the final state, as `initial_state`.

    Raises:
        ValueError: for a shape, dtype or device that does not fit, or for `in_place` without a state, with one that
            shares memory with an input, or where a gradient is wanted; the message names the argument, what it was and
            what it may be.
        BackendUnavailable: if the backend cannot do this.
        NotImplementedError: of "native", if an input carries a tangent of forward-mode differentiation.

    Examples:
        >>> q, k, v = torch.rand(3, 1, 5, 2, 4).unbind(0)  # one row, 5 steps, 2 heads of 4
        >>> out, state = sum_rule(q, k, v)
        >>> out.shape, state.shape
        (torch.Size([1, 5, 2, 4]), torch.Size([1, 2, 4, 4]))
        >>> _, first = sum_rule(q[:, :3], k[:, :3], v[:, :3])
        >>> rest, _ = sum_rule(q[:, 3:], k[:, 3:], v[:, 3:], initial_state=first)
        >>> torch.allclose(rest, out[:, 3:], atol=1e-5)
        True
    """
    return RULES["sum"](q, k, v, initial_state=initial_state, starts=starts, in_place=in_place, backend=backend)


def _as_sum_rule(function: _Function) -> _Function:
    """Completes a docstring by what that of `sum_rule` says of the arguments that all have, of results and errors."""
    if function.__doc__ and sum_rule.__doc__:
        own, shared = inspect.cleandoc(function.__doc__), inspect.cleandoc(sum_rule.__doc__)
        first, options, end = (shared.index(part) for part in ("    q: ", "    initial_state: ", "Examples:\n"))
        own = own.replace("Args:\n", f"Args:\n{shared[first:options]}", 1)
        function.__doc__ = own.replace("\nExamples:\n", f"{shared[options:end]}Examples:\n", 1)
    return function


@_as_sum_rule
def gated_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gate: Tensor,
    *,
    initial_state: Tensor | None = None,
    starts: Tensor | None = None,
    in_place: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """One gate for old and new: S_t = g_t S_{t-1} + (1 - g_t) v_t k_t^T, y_t = S_t q_t (Mao 2022, Eq. 5).

    Args:
        log_gate: (batch, time, heads), log g_t, at most 0.

    Examples:
        >>> q, k, v = torch.rand(3, 1, 5, 2, 4).unbind(0)
        >>> log_gate = torch.nn.functional.logsigmoid(torch.randn(1, 5, 2))
        >>> out, state = gated_rule(q, k, v, log_gate)
        >>> out.shape, state.shape
        (torch.Size([1, 5, 2, 4]), torch.Size([1, 2, 4, 4]))
    """
    return RULES["gated"](
        q, k, v, log_gate, initial_state=initial_state, starts=starts, in_place=in_place, backend=backend
    )


@_as_sum_rule
def decay_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_key_decay: Tensor | None,
    log_value_decay: Tensor | None,
    *,
    initial_state: Tensor | None = None,
    starts: Tensor | None = None,
    in_place: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """An elementwise decay of rank one: S_t = (z_t f_t^T) * S_{t-1} + v_t k_t^T, y_t = S_t q_t (Mao 2022, Eq. 7).

    Args:
        log_key_decay: (batch, time, heads, key_dim), log f_t, at most 0; None for no decay of keys.
        log_value_decay: (batch, time, heads, value_dim), log z_t, at most 0; None for no decay of values.

    Examples:
        >>> q, k, v = torch.rand(3, 1, 5, 2, 4).unbind(0)
        >>> out, state = decay_rule(q, k, v, -torch.rand(1, 5, 2, 4), None)
        >>> out.shape, state.shape
        (torch.Size([1, 5, 2, 4]), torch.Size([1, 2, 4, 4]))
    """
    return RULES["decay"](
        q,
        k,
        v,
        log_key_decay,
        log_value_decay,
        initial_state=initial_state,
        starts=starts,
        in_place=in_place,
        backend=backend,
    )


@_as_sum_rule
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    starts: Tensor | None = None,
    in_place: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Corrects what the key retrieves: S_t = S_{t-1} + beta_t (v_t - S_{t-1} k_t) k_t^T, y_t = S_t q_t.

    Schlag et al. 2021, Eq. 24 and 25. Keys should be normalised (their components sum to 1, or their norm is at most
    1): a step multiplies the state by I - beta k k^T, which makes it grow if |k|^2 > 2 / beta.

    Args:
        beta: (batch, time, heads), the write strength, from 0 to 1.

    Examples:
        >>> k = torch.eye(4)[[0, 1, 0]].view(1, 3, 1, 4)  # the first key comes again
        >>> v = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1)
        >>> out, state = delta_rule(k, k, v, torch.ones(1, 3, 1))
        >>> state.flatten()  # its value was replaced; the sum rule would have 4 there
        tensor([3., 2., 0., 0.])
    """
    return RULES["delta"](q, k, v, beta, initial_state=initial_state, starts=starts, in_place=in_place, backend=backend)


@_as_sum_rule
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_gate: Tensor,
    *,
    initial_state: Tensor | None = None,
    starts: Tensor | None = None,
    in_place: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Forgets, then corrects: S' = S_{t-1} Diag(f_t), S_t = S' + beta_t (v_t - S' k_t) k_t^T, y_t = S_t q_t.

    With a gate for each head this is Gated DeltaNet (Yang et al. 2025), with one for each key dimension Kimi delta
    attention (Kimi Team 2025). Keys should have a norm of at most 1, as in `delta_rule`.

    Args:
        beta: (batch, time, heads), the write strength, from 0 to 1; above 1, and up to 2, what a key retrieves may
            change its sign.
        log_gate: (batch, time, heads) or (batch, time, heads, key_dim), log f_t, at most 0.

    Examples:
        >>> q = k = torch.nn.functional.normalize(torch.randn(1, 5, 2, 4), dim=-1)
        >>> v, beta, log_gate = torch.randn(1, 5, 2, 3), torch.rand(1, 5, 2), -torch.rand(1, 5, 2)
        >>> out, state = gated_delta_rule(q, k, v, beta, log_gate)
        >>> out.shape, state.shape
        (torch.Size([1, 5, 2, 3]), torch.Size([1, 2, 4, 3]))
    """
    return RULES["gated-delta"](
        q, k, v, beta, log_gate, initial_state=initial_state, starts=starts, in_place=in_place, backend=backend
    )


@_as_sum_rule
def fast_weight_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    erase: Tensor | None = None,
    beta: Tensor | None = None,
    log_key_decay: Tensor | None = None,
    log_value_decay: Tensor | None = None,
    initial_state: Tensor | None = None,
    starts: Tensor | None = None,
    in_place: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The recurrence that contains all rules, with every part but q, k and v optional.

    S' = (z_t f_t^T) * S_{t-1}, S_t = S' + beta_t (v_t - S' e_t) k_t^T, y_t = S_t q_t. With e = 0 it adds (sum, decay),
    with e = k it corrects (delta, gated delta). With an e of its own it erases under another key than it writes under
    (the two-gate delta rule: e = b * k, v = w * v').

    Args:
        erase: (batch, time, heads of k, key_dim), e_t; what it retrieves is taken out. None for 0.
        beta: (batch, time, heads), the write strength, from 0 to 2; None for 1.
        log_key_decay: (batch, time, heads) or (batch, time, heads, key_dim), log f_t, at most 0; None for no decay.
        log_value_decay: (batch, time, heads, value_dim), log z_t, at most 0; None for no decay. With `erase` no kernel
            takes it, and "chunkwise" goes step by step.

    Examples:
        >>> q, k, v = torch.rand(3, 1, 5, 2, 4).unbind(0)
        >>> corrected, _ = fast_weight_rule(q, k / 2, v, erase=k / 2)
        >>> torch.allclose(corrected, delta_rule(q, k / 2, v, torch.ones(1, 5, 2))[0], atol=1e-5)
        True
    """
    return RULES["fast-weight"](
        q,
        k,
        v,
        erase,
        beta,
        log_key_decay,
        log_value_decay,
        initial_state=initial_state,
        starts=starts,
        in_place=in_place,
        backend=backend,
    )


def chosen_backend(
    device: torch.device | str, dtype: torch.dtype, time: int, rule: str = "sum", key_dim: int = 1
) -> str:
    """The backend that "auto" takes.

    It is told of no gates and `starts`: if a call has some that no kernel takes (`erase` with `log_value_decay`, say),
    "auto" takes what it takes without kernels.

    Args:
        device: where the tensors are.
        dtype: of q, k and v.
        time: how many steps the call has.
        rule: a key of `RULES`.
        key_dim: of the keys; it matters only for rules that correct, with keys larger than a GPU's kernels take.

    Returns:
        one of `BACKENDS`.

    Raises:
        ValueError: for a rule that is none of these.

    Examples:
        >>> chosen_backend("cpu", torch.float32, time=128, rule="delta") in ("native", "chunkwise")
        True
    """
    if rule not in RULES:
        raise ValueError(f"rule is {rule!r}; it must be one of {', '.join(RULES)}")
    return RULES[rule].best_backend(torch.device(device).type, dtype, time, key_dim)
