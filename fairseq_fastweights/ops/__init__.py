"""The update rules as pure functions of tensors: rows of one recurrence, `fast_weight_rule`.

Sequences are (batch, time, heads, dim), states (batch, heads, key_dim, value_dim). Every operation returns
``(out, final_state)``: `out` is (batch, time, heads, value_dim) in the dtype of `v`, states are float32 (float64 for
float64 inputs). Any strides will do as long as the last dimension of q, k and v is contiguous.

`backend` is "reference" (one step at a time: the definition), "chunkwise" (chunk-parallel PyTorch), "native"
(compiled kernels) or "auto" (`chosen_backend`: native where it was built). A backend that cannot do what is asked
raises `BackendUnavailable`; none ever stands in for another in silence. Backward passes are everyone's; forward-mode
derivatives (`torch.func.jvp`) only "reference" has.

`starts` marks the first steps of documents that follow one another in a row: the state is emptied before each, and no
gradient passes. Where v has more heads than q and k, as many of its heads in turn share one of theirs.

With `in_place` the final state is written into `initial_state`, which is returned as the final state: generation, a
token at a time, then moves no more than the state. Nothing of such a call can be differentiated.

`selective_scan`, the recurrence of Mamba, is no update rule: it has no queries and keys, but the same three forms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_fastweights.ops.checks import BackendUnavailable, GateInput, check_values, state_dtype
from fairseq_fastweights.ops.operations import BACKENDS, OPERATIONS, Operation
from fairseq_fastweights.ops.scan import selective_scan

__all__ = [
    "BACKENDS",
    "OPERATIONS",
    "BackendUnavailable",
    "GateInput",
    "Operation",
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
        q, k: (batch, time, heads, key_dim), already through the feature map and normalised; their heads may be fewer,
            if those of v are a multiple.
        v: (batch, time, heads, value_dim).
        initial_state: (batch, heads, key_dim, value_dim), None for zeros.
        starts: (batch, time), bool: whether the state is emptied before a step. None for never.
        in_place: whether the final state replaces the initial one where that lies.
        backend: one of `BACKENDS`.

    Returns:
        out (batch, time, heads, value_dim) and the final state (batch, heads, key_dim, value_dim).

    Raises:
        ValueError: for a shape, dtype or device that does not fit, or `in_place` without a state or where a gradient is
            wanted; the message names the argument.
        BackendUnavailable: if the backend cannot do it.
        NotImplementedError: of "native", if an input carries a tangent of forward-mode differentiation.
    """
    return OPERATIONS["sum"](q, k, v, initial_state=initial_state, starts=starts, in_place=in_place, backend=backend)


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
        others: as in `sum_rule`, which also says what is returned and raised.
    """
    return OPERATIONS["gated"](
        q, k, v, log_gate, initial_state=initial_state, starts=starts, in_place=in_place, backend=backend
    )


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
        log_key_decay: (batch, time, heads, key_dim), log f_t, at most 0; None for no decay.
        log_value_decay: (batch, time, heads, value_dim), log z_t, at most 0; None for no decay.
        others: as in `sum_rule`, which also says what is returned and raised.
    """
    return OPERATIONS["decay"](
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
    1): a step multiplies the state by I - beta k k^T, which for |k|^2 > 2 / beta makes it grow.

    Args:
        beta: (batch, time, heads), the write strength in [0, 1].
        others: as in `sum_rule`, which also says what is returned and raised.
    """
    return OPERATIONS["delta"](
        q, k, v, beta, initial_state=initial_state, starts=starts, in_place=in_place, backend=backend
    )


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
        beta: (batch, time, heads), the write strength in [0, 1]; up to 2 it may turn what a key retrieves around.
        log_gate: (batch, time, heads) or (batch, time, heads, key_dim), log f_t, at most 0.
        others: as in `sum_rule`, which also says what is returned and raised.

    Example:
        >>> q = k = torch.nn.functional.normalize(torch.randn(1, 5, 2, 4), dim=-1)
        >>> v, beta, log_gate = torch.randn(1, 5, 2, 3), torch.rand(1, 5, 2), -torch.rand(1, 5, 2)
        >>> out, state = gated_delta_rule(q, k, v, beta, log_gate)
        >>> out.shape, state.shape
        (torch.Size([1, 5, 2, 3]), torch.Size([1, 2, 4, 3]))
    """
    return OPERATIONS["gated-delta"](
        q, k, v, beta, log_gate, initial_state=initial_state, starts=starts, in_place=in_place, backend=backend
    )


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
    """The recurrence that all rules are rows of, with every part but q, k and v optional.

    S' = (z_t f_t^T) * S_{t-1}, S_t = S' + beta_t (v_t - S' e_t) k_t^T, y_t = S_t q_t. With e = 0 it adds (sum, decay),
    with e = k it corrects (delta, gated delta), with an e of its own it erases under another key than it writes under
    (the two-gate delta rule: e = b * k, v = w * v').

    Args:
        erase: (batch, time, heads of k, key_dim), e_t; None for 0. What it retrieves is taken out.
        beta: (batch, time, heads), the write strength in [0, 2]; None for 1.
        log_key_decay: (batch, time, heads) or (batch, time, heads, key_dim), log f_t, at most 0; None for no decay.
        log_value_decay: (batch, time, heads, value_dim), log z_t, at most 0; None for no decay. With `erase` no kernel
            takes it, and "chunkwise" goes step by step.
        others: as in `sum_rule`, which also says what is returned and raised.

    Example:
        >>> q, k, v = torch.rand(3, 1, 5, 2, 4).unbind(0)
        >>> corrected, _ = fast_weight_rule(q, k / 2, v, erase=k / 2)
        >>> torch.allclose(corrected, delta_rule(q, k / 2, v, torch.ones(1, 5, 2))[0], atol=1e-5)
        True
    """
    return OPERATIONS["fast-weight"](
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
    """What "auto" takes for tensors on `device`, of `dtype`, with `time` steps.

    That depends on `rule`, a key of `OPERATIONS`, and on `key_dim` only for a rule that corrects and keys that are
    larger than a GPU's kernels take. It is told of no gates and `starts`: where no kernel takes those that a call has
    (`erase` with `log_value_decay`, say), "auto" takes what it takes without kernels.

    Raises:
        ValueError: for a rule that is none of these.
    """
    if rule not in OPERATIONS:
        raise ValueError(f"rule is {rule!r}; it must be one of {', '.join(OPERATIONS)}")
    return OPERATIONS[rule].best_backend(torch.device(device).type, dtype, time, key_dim)
