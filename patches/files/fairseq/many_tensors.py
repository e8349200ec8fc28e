"""Updates all parameters in a few operators, where fairseq's optimizers launch several for each.

A model of 16 layers has more than 200 parameters, most of them small: on a GPU, launching an operator takes longer than
running it. PyTorch's operators for lists of tensors (`torch._foreach_...`, `torch._fused_adamw_`) run on a CPU too.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)
_PORTION = 2**24
"""So many numbers of parameters in 16 bits are converted to 32 bits at a time."""
NAG_ON = ("cuda",)
"""The devices where `nag` takes all parameters together. A CPU keeps one parameter at a time in its cache."""


def _by_device(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    found: dict[torch.device, list[Tensor]] = defaultdict(list)
    for x in tensors:
        found[x.device].append(x)
    yield from found.values()


def multiply(tensors: Iterable[Tensor], factor: Any) -> None:
    """Multiplies every tensor by a number, or by a tensor that holds one; a GPU is not waited for."""
    for some in _by_device(tensors):
        here = factor
        # float() of a number on a CPU waits for nothing; one on a GPU is copied there.
        if torch.is_tensor(factor) and factor.device != some[0].device:
            here = float(factor) if factor.device.type == "cpu" else factor.to(some[0].device)
        torch._foreach_mul_(some, here)


def total_norm(tensors: Sequence[Tensor], device: Any) -> Tensor:
    """The norm of all numbers of all tensors together, in float32 on `device`."""
    dense = [x.coalesce().values() if x.is_sparse else x for x in tensors]
    norms = [
        norm.to(device) for some in _by_device(dense) for norm in torch._foreach_norm(some, 2, dtype=torch.float32)
    ]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies every source to its target, whose type may be another."""
    if targets:
        torch._foreach_copy_(targets, sources)


def copy_gradients(params: list[Any], targets: list[Tensor]) -> None:
    """Copies the gradient of every parameter to its target, which is filled with zeros where there is none."""
    there = [(target, p.grad.detach()) for target, p in zip(targets, params, strict=True) if p.grad is not None]
    copy([target for target, _ in there], [grad for _, grad in there])
    missing = [target for target, p in zip(targets, params, strict=True) if p.grad is None]
    if missing:
        torch._foreach_zero_(missing)


def average(averages: list[Tensor], values: list[Tensor], decay: float) -> None:
    """averages = decay averages + (1 - decay) values, in the type of the averages."""
    for some in _portions(range(len(values)), lambda i: values[i].numel()):
        ours = [averages[i] for i in some]
        # a <- decay a + (1 - decay) v
        torch._foreach_mul_(ours, decay)
        torch._foreach_add_(ours, [values[i].to(averages[i].dtype) for i in some], alpha=1 - decay)


def _portions(things: Iterable[Any], size: Callable[[Any], int]) -> Iterator[list[Any]]:
    """Lists of things that follow each other, each of about `_PORTION` numbers."""
    found: list[Any] = []
    total = 0
    for x in things:
        if found and total + size(x) > _PORTION:
            yield found
            found, total = [], 0
        found.append(x)
        total += size(x)
    if found:
        yield found


def in_float32(params: Sequence[Any]) -> Iterator[tuple[list[Any], list[Tensor], list[Tensor]]]:
    """Parameters of one type that have gradients, their numbers and their gradients, in float32 for those in 16 bits.

    Those in 16 bits come in portions, which are copied back after their update.
    """
    # In place: the yielded numbers share memory with the parameters.
    if params and params[0].dtype not in _HALF:
        yield list(params), [p.detach() for p in params], [p.grad.detach().to(p.dtype) for p in params]
        return
    for some in _portions(params, lambda p: int(p.numel())):
        values, grads = ([torch.empty_like(p, dtype=torch.float32) for p in some] for _ in range(2))
        copy(values, [p.detach() for p in some])
        copy(grads, [p.grad.detach() for p in some])
        yield some, values, grads
        copy([p.detach() for p in some], values)


def goes_together(p: Any) -> bool:
    """Says whether a parameter and its gradient lie in memory as operators that take lists of tensors want them."""
    return (
        p.device.type in ("cpu", "cuda")
        and p.dtype in (torch.float32, torch.float64, *_HALF)
        and not p.grad.is_sparse
        and p.is_contiguous()
    )


def adam(params: Sequence[Any], state: dict[Any, dict[str, Any]], group: dict[str, Any], skip: Any = None) -> list[Any]:
    """A step of fairseq's Adam for all parameters that have gradients and go together; returns the others.

    fairseq adds epsilon to the square root of the running average before its bias is corrected, torch after it: so
    torch gets epsilon divided by the correction.

    Args:
        params: some of the group's.
        state: the optimizer's, by parameter; numbers of steps are Python's.
        group: with lr, betas, eps and weight_decay.
        skip: a tensor that holds 1. where nothing shall be changed, or None.
    """
    others, found = [], defaultdict(list)
    # One call of the operator for each device, type and number of steps.
    for p in params:
        if not goes_together(p):
            others.append(p)
            continue
        known = state[p]
        if not known:
            like = torch.float32 if p.dtype in _HALF else p.dtype
            known["step"] = 0
            known["exp_avg"], known["exp_avg_sq"] = (torch.zeros_like(p, dtype=like) for _ in range(2))
        known["step"] += 1
        found[p.device, p.dtype, known["step"]].append(p)
    beta1, beta2 = group["betas"]
    for (device, _, step), some in found.items():
        steps = torch.full((), float(step), dtype=torch.float32, device=device)
        for portion, values, grads in in_float32(some):
            averages: tuple[list[Tensor], list[Tensor]] = ([], [])
            for name, kept in zip(("exp_avg", "exp_avg_sq"), averages, strict=True):
                for p, value in zip(portion, values, strict=True):
                    state[p][name] = state[p][name].to(value).contiguous()
                    kept.append(state[p][name])
            # p <- p - lr weight_decay p, before the step, as fairseq does
            if group["weight_decay"]:  # torch's own rounds 1 - lr weight_decay, which is always off to the same side
                torch._foreach_add_(values, values, alpha=-group["weight_decay"] * group["lr"])
            # p <- p - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps / sqrt(1 - beta2^t))
            torch._fused_adamw_(
                values,
                [grad.contiguous() for grad in grads],
                *averages,
                [],
                [steps] * len(values),
                amsgrad=False,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=0.0,
                eps=group["eps"] / math.sqrt(1 - beta2**step),
                maximize=False,
                found_inf=skip,
            )
    return others


def nag(params: Sequence[Any], state: dict[Any, dict[str, Any]], group: dict[str, Any], change: float) -> list[Any]:
    """A step of fairseq's accelerated gradient for all parameters that go together; returns the others.

    Args:
        params: those of the group that have gradients.
        state: the optimizer's, by parameter.
        group: with lr, momentum and weight_decay.
        change: the learning rate over that of the step before.
    """
    others: list[Any] = []
    found: dict[Any, list[Any]] = defaultdict(list)
    for p in params:
        # The state of all is in float32.
        alike = p.device.type in NAG_ON and goes_together(p) and p.dtype != torch.float64
        (found[p.device, p.dtype] if alike else others).append(p)
    momentum, rate = group["momentum"], group["lr"]
    for some in found.values():
        for portion, values, grads in in_float32(some):
            for p, value in zip(portion, values, strict=True):
                kept = state[p].get("momentum_buffer")
                state[p]["momentum_buffer"] = torch.zeros_like(value) if kept is None else kept.to(value)
            buffers = [state[p]["momentum_buffer"] for p in portion]
            if group["weight_decay"]:
                torch._foreach_mul_(values, 1 - rate * group["weight_decay"])
            # With m the momentum, b its buffer and c = lr / (lr of the last step):
            # p <- p + m^2 c b - (1 + m) lr g, then b <- m c b - lr g
            torch._foreach_add_(values, buffers, alpha=momentum * momentum * change)
            torch._foreach_add_(values, grads, alpha=-(1 + momentum) * rate)
            torch._foreach_mul_(buffers, momentum * change)
            torch._foreach_add_(buffers, grads, alpha=-rate)
    return others
