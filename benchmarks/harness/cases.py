"""The measured cases: shapes, and the inputs of every rule at a shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_fastweights import ops

_KIMI = tuple(replace(gate, per="key") if gate.log else gate for gate in ops.RULES["gated-delta"].gates)
RULES = {
    **{name.replace("-", "_"): rule for name, rule in ops.RULES.items() if name not in ("delta-mao", "fast-weight")},
    "kimi_delta": replace(ops.RULES["gated-delta"], gates=_KIMI),
}
"""By their names in records, without rules that run the kernels of another one."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Shape:
    """Sizes of (batch, time, heads, dim); `cpu_batch`, if given, is the batch on a CPU, for calls of milliseconds."""

    name: str
    batch: int
    heads: int
    time: int
    key_dim: int
    value_dim: int
    cpu_batch: int | None = None

    @property
    def steps(self) -> bool:
        """True for a decode step: one token, with a state and without gradients."""
        return self.time == 1


# In the order of measurement: shapes of a target come before those that may be cut. They are those of Schlag et al.
# (language models, WMT14, with DPFP or FAVOR+ where keys are longer), of Mao (GPT-2, WikiText-103), of Choi's RetNet,
# of decode steps, of contexts of 1,024 and 16,384 tokens, and of Gated DeltaNet's heads of 128.
SHAPES = {
    name: Shape(name, *sizes)
    for name, *sizes in (
        ("lm-small", 96, 8, 256, 16, 16, 48),
        ("lm-medium", 56, 8, 384, 32, 32, 28),
        ("mt-big", 56, 16, 64, 64, 64, 28),
        ("attention", 8, 8, 1024, 64, 64, 4),
        ("step-8", 8, 8, 1, 64, 64),
        ("gpt2-16", 32, 12, 1024, 16, 64, 4),
        ("baevski-64", 26, 8, 512, 64, 128, 4),
        ("lm-small-dpfp", 96, 8, 256, 32, 16, 48),
        ("mt-big-256", 56, 16, 64, 256, 64, 7),
        ("retnet", 4, 4, 2048, 256, 512, 1),
        ("long", 1, 8, 16384, 64, 64),
        ("heads-128", 4, 16, 2048, 128, 128, 1),
        ("gpt2-32", 32, 12, 1024, 32, 64, 4),
        ("baevski-32", 26, 8, 512, 32, 128, 4),
        ("mt-big-512", 56, 16, 64, 512, 64, 4),
        ("gpt2-4", 32, 12, 1024, 4, 64, 4),
        ("step-1", 1, 8, 1, 64, 64),
        ("step-64", 64, 8, 1, 64, 64),
    )
}

# For --quick, one of each kind.
QUICK_SHAPES = (Shape("quick", 2, 2, 48, 8, 16, 1), Shape("quick-step", 2, 2, 1, 8, 16, 1))


@dataclass(frozen=True)
class Inputs:
    """The inputs of all implementations, in the layout (batch, time, heads, dim), contiguous."""

    q: Tensor  # (batch, time, heads, key_dim)
    k: Tensor  # the same, normalised to length 1, as the delta rule needs it
    v: Tensor  # (batch, time, heads, value_dim)
    d_out: Tensor  # the gradient that arrives at the output, of the shape of v
    wide_q: Tensor  # queries and keys of softmax attention with this head size, of the shape of v
    wide_k: Tensor
    gates: dict[str, list[Tensor]]  # by rule its arguments after q, k and v, in order
    state: Tensor | None  # (batch, heads, key_dim, value_dim), float32; only for a shape of one step


def draw_inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int = 0) -> Inputs:
    """Random inputs of all rules; the gates, too, have this dtype."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*dims: int, change: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
        sizes = (shape.batch, shape.time, shape.heads, *dims)
        return change(torch.randn(sizes, generator=generator, device=device)).to(dtype)

    keys, values, decay = shape.key_dim, shape.value_dim, lambda x: F.logsigmoid(x + 3)
    # Decays near 1 (logsigmoid(x + 3) is about -0.05) as models begin with.
    q, k, v, d_out = normal(keys), normal(keys, change=partial(F.normalize, dim=-1)), normal(values), normal(values)

    @cache
    def drawn(per: str, log: bool) -> Tensor:
        dims = {"key": (keys,), "value": (values,)}.get(per, ())
        return normal(*dims, change=decay if log else torch.sigmoid)

    gates = {name: [drawn(gate.per, gate.log) for gate in rule.gates] for name, rule in RULES.items()}
    wide_q, wide_k = normal(values), normal(values)
    sizes = (shape.batch, shape.heads, keys, values)
    state = torch.randn(sizes, generator=generator, device=device) if shape.steps else None
    return Inputs(q, k, v, d_out, wide_q, wide_k, gates, state)
