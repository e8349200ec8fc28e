"""What an optimizer does to all parameters, in a few operators in place of some for each of them.

`tools/fairseq_cures.py` puts this module into fairseq as `fairseq/many_tensors.py`. A model of 16 layers has more than
200 parameters, most of them small: on a GPU to start an operator takes longer than to run it. PyTorch has operators
that take lists of tensors (`torch._foreach_...`, `torch._fused_adamw_`), on a CPU too.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)
_PORTION = 2**24
"""So many numbers of parameters in 16 bits are in 32 bits at a time, within an optimizer's step."""


def _by_device(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    found: dict[torch.device, list[Tensor]] = defaultdict(list)
    for x in tensors:
        found[x.device].append(x)
    yield from found.values()


def multiply(tensors: Iterable[Tensor], factor: Any) -> None:
    """Multiplies every tensor by a number, or by a tensor that holds one; a GPU is not waited for."""
    for some in _by_device(tensors):
        here = factor
        if torch.is_tensor(factor) and factor.device != some[0].device:
            here = float(factor) if factor.device.type == "cpu" else factor.to(some[0].device)
        torch._foreach_mul_(some, here)


def total_norm(tensors: Sequence[Tensor], device: Any) -> Tensor:
    """The norm of all numbers of all tensors together, in float32 on `device`."""
    if any(x.is_sparse for x in tensors):
        norms = [torch.norm(x, p=2, dtype=torch.float32).to(device) for x in tensors]
    else:
        norms = [
            norm.to(device)
            for some in _by_device(tensors)
            for norm in torch._foreach_norm(some, 2, dtype=torch.float32)
        ]
    return torch.linalg.vector_norm(torch.stack(norms))


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies every source to its target, whose type may be another."""
    if targets:
        torch._foreach_copy_(targets, sources)


def copy_gradients(params: Sequence[Any], targets: Sequence[Tensor]) -> None:
    """Copies the gradient of every parameter to its target, which is filled with zeros where there is none."""
    there = [(target, p.grad.detach()) for target, p in zip(targets, params) if p.grad is not None]
    copy([target for target, _ in there], [grad for _, grad in there])
    missing = [target for target, p in zip(targets, params) if p.grad is None]
    if missing:
        torch._foreach_zero_(missing)


def average(averages: Sequence[Tensor], values: Sequence[Tensor], decay: float) -> None:
    """averages = decay averages + (1 - decay) values, in the type of the averages."""
    if averages:
        torch._foreach_mul_(averages, decay)
        same = [x.to(dtype=average.dtype) for x, average in zip(values, averages)]
        torch._foreach_add_(averages, same, alpha=1 - decay)


def in_float32(
    params: Sequence[Any], numbers: int = _PORTION
) -> Iterator[tuple[list[Any], list[Tensor], list[Tensor]]]:
    """Parameters that have gradients, their numbers and their gradients in float32, or as they are if in no 16 bits.

    What becomes of the numbers is copied back. Parameters in 16 bits come in portions of about so many numbers.
    """
    half = [p for p in params if p.dtype in _HALF]
    if len(half) < len(params):
        whole = [p for p in params if p.dtype not in _HALF]
        yield whole, [p.detach() for p in whole], [p.grad.detach().to(p.dtype) for p in whole]
    while half:
        size = count = 0
        while count < len(half) and (not count or size + half[count].numel() <= numbers):
            size += half[count].numel()
            count += 1
        some, half = half[:count], half[count:]
        values, grads = ([torch.empty_like(p, dtype=torch.float32) for p in some] for _ in range(2))
        copy(values, [p.detach() for p in some])
        copy(grads, [p.grad.detach() for p in some])
        yield some, values, grads
        copy([p.detach() for p in some], values)


def goes_together(p: Any) -> bool:
    """Whether a parameter and its gradient lie in memory as operators that take lists of tensors want them."""
    return (
        p.device.type in ("cpu", "cuda")
        and p.dtype in (torch.float32, torch.float64, *_HALF)
        and not p.grad.is_sparse
        and p.is_contiguous()
    )


def adam(params: Sequence[Any], state: dict[Any, dict[str, Any]], group: dict[str, Any], skip: Any = None) -> list[Any]:
    """A step of fairseq's Adam for all parameters that have gradients and go together; returns the others.

    fairseq adds epsilon to the square root of the running average before the bias of that is corrected, torch after it:
    what torch is told is epsilon divided by the correction.

    Args:
        params: some of the group's.
        state: the optimizer's, by parameter; numbers of steps are Python's.
        group: with lr, betas, eps and weight_decay.
        skip: a tensor that holds 1. where nothing shall be changed, or None.
    """
    others, found = [], defaultdict(list)
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
            averages = []
            for name in ("exp_avg", "exp_avg_sq"):
                for p, value in zip(portion, values):
                    state[p][name] = state[p][name].to(value).contiguous()
                averages.append([state[p][name] for p in portion])
            if group["weight_decay"]:  # torch's own rounds 1 - lr weight_decay, which is always off to the same side
                torch._foreach_add_(values, values, alpha=-group["weight_decay"] * group["lr"])
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
