"""Runs Hugging Face's models with gated delta rules on a CPU with this package's operations.

    from fairseq_fastweights.integrations import transformers as fast
    fast.install()       # from here on; fast.uninstall() undoes it
    with fast.install():  # or for as long as this lasts
        model.generate(...)

For tensors on a CPU, Qwen3-Next, Qwen3.5, OLMo-hybrid and Kimi-Linear call functions of their modules that are written
in PyTorch: the rule for a sequence and for a token, and the short convolution before it. `install` replaces them by
functions with the same results, in prefill, generation with a cache, and training. Tensors on other devices still go to
the original functions.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_fastweights import ops
from fairseq_fastweights.invalid_input import InvalidInput

try:
    import transformers
    from transformers.activations import ACT2FN
except ImportError as error:
    raise ImportError(f"{__name__} needs transformers: pip install transformers") from error

MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear")
"""The modules of `transformers.models` that are supported."""

_before: dict[tuple[str, str], Callable[..., Any]] = {}
"""The original functions that are replaced now, by module and name."""


class UnknownFunction(RuntimeError):
    """The installed version of `transformers` has other functions than expected; nothing was replaced."""


class install:
    """Makes models of `transformers` use the operations of this package on CPUs, until `uninstall`.

    In a `with` statement, until its end.

    Args:
        model: a model, whose whole class is changed; None for all classes in `MODELS` that this `transformers` has.

    Raises:
        UnknownFunction: if a function to replace is missing or has other arguments; nothing is replaced then.
        ValueError: for a model of another class, or no model.

    Examples:
        >>> from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
        >>> with install():
        ...     print(qwen3_next.torch_chunk_gated_delta_rule.__module__)
        fairseq_fastweights.integrations.transformers
        >>> print(qwen3_next.torch_chunk_gated_delta_rule.__module__)
        transformers.models.qwen3_next.modeling_qwen3_next
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        modules = _modules(model)
        found = [(module, name) for module in modules for name in _known(module)]
        for module, name in found:
            key = (module.__name__, name)
            if key not in _before:
                _before[key] = getattr(module, name)
                setattr(module, name, _replacement(name, _before[key]))

    def __enter__(self) -> install:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        uninstall()


def uninstall() -> None:
    """Puts the original functions of `transformers` back.

    Examples:
        >>> from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
        >>> _ = install()
        >>> uninstall()
        >>> print(qwen3_next.torch_chunk_gated_delta_rule.__module__)
        transformers.models.qwen3_next.modeling_qwen3_next
    """
    while _before:
        (module, name), function = _before.popitem()
        setattr(importlib.import_module(module), name, function)


def _modules(model: nn.Module | None) -> list[ModuleType]:
    names = [f"transformers.models.{name}.modeling_{name}" for name in MODELS]
    if not isinstance(model, (nn.Module, type(None))):
        raise InvalidInput(f"model is {model!r:.200}; it must be a model, a torch.nn.Module, or None for all classes")
    if model is not None:
        of_model = {type(part).__module__ for part in model.modules()}
        names = [name for name in names if name in of_model]
        if not names:
            raise InvalidInput(
                f"model is a {type(model).__name__}, which has no layer of these: {', '.join(MODELS)}; it must have one"
            )
    there = [name for name in names if importlib.util.find_spec(name.rpartition(".")[0]) is not None]
    modules = [importlib.import_module(name) for name in there]
    if not modules:
        raise UnknownFunction(f"transformers {transformers.__version__} has none of these models: {', '.join(MODELS)}")
    return modules


def _known(module: ModuleType) -> Mapping[str, Any]:
    """The names of a module's functions to replace, after a check that they exist and take the expected arguments."""
    names = _CONVOLUTION | (_KIMI if module.__name__.endswith("kimi_linear") else _GATED)
    for name, parameters in names.items():
        function = _before.get((module.__name__, name), getattr(module, name, None))
        takes = None if function is None else tuple(inspect.signature(function).parameters)
        if takes != parameters:
            found = "has no such function" if takes is None else f"takes {', '.join(takes)}"
            raise UnknownFunction(
                f"{name} of {module.__name__} in transformers {transformers.__version__} {found}; it must take "
                f"{', '.join(parameters)}, as in 5.20"
            )
    return names


def _replacement(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    convolutions: dict[str, Callable[..., Any]]
    convolutions = {"causal_conv1d_fn": _convolve, "causal_conv1d_update": _convolve_next}
    ours = convolutions.get(name, _rule)
    signature = inspect.signature(original)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        first = next(iter(given.arguments.values()))
        # A GPU has kernels of its own for these functions.
        if first.device.type != "cpu":
            return original(*args, **kwargs)
        found = ours(**{key: x for key, x in given.arguments.items() if key not in ("kwargs", "chunk_size")})
        return original(*args, **kwargs) if found is None else found

    replaced.__name__, replaced.__doc__ = name, f"{ours.__doc__} In the place of {original.__module__}.{name}."
    return replaced


def _rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule with decays per head or per key, in float32, with queries divided by sqrt(key_dim)."""
    # After prompts shorter than the convolution's kernel, and parts of prompts, time is contiguous instead of channels.
    q, k, v = (x.to(torch.float32).contiguous() for x in (query, key, value))
    g, beta = g.to(torch.float32), beta.to(torch.float32)
    # The epsilon and the place of the scale are those of the replaced functions.
    scale = q.shape[-1] ** -0.5
    if use_qk_l2norm_in_kernel:
        q = q * (torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * scale)
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    else:
        q = q * scale
    state = None if initial_state is None else initial_state.to(torch.float32)
    out, final_state = ops.gated_delta_rule(q, k, v, beta, g, initial_state=state)
    return out.to(query.dtype), final_state if output_final_state else None


def _convolve(hidden_states: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """The causal convolution of each channel, (batch, channels, time); channels are contiguous in memory."""
    x = hidden_states.transpose(1, 2).to(weight.dtype)
    time = x.shape[1]
    last, *earlier = weight.unbind(1)[::-1]
    # One multiplication per tap: a convolution of channels on their own is slow on CPUs.
    y = x * last if bias is None else torch.addcmul(bias, x, last)
    for i, of_one in enumerate(earlier[: time - 1], 1):
        y[:, i:].addcmul_(x[:, : time - i], of_one)
    return _activated(y, activation).to(hidden_states.dtype).transpose(1, 2)


def _convolve_next(
    hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor | None:
    """The same of one position, (batch, channels, 1), after those of `conv_state`, which it joins."""
    if hidden_states.shape[-1] != 1:
        return None
    inputs = torch.cat([conv_state, hidden_states], -1).to(weight.dtype)
    conv_state.copy_(inputs[..., 1:])
    y = torch.linalg.vecdot(inputs[..., -weight.shape[1] :], weight)[..., None]
    return _activated(y if bias is None else y + bias[:, None], activation).to(hidden_states.dtype)


def _activated(x: Tensor, activation: str | None) -> Tensor:
    return x if activation is None else ACT2FN[activation](x)


_RULE = ("query", "key", "value", "g", "beta")
_OPTIONS = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "kwargs")
_GATED = {
    "torch_chunk_gated_delta_rule": (*_RULE, "chunk_size", *_OPTIONS),
    "torch_recurrent_gated_delta_rule": (*_RULE, *_OPTIONS),
}
_KIMI = {
    "chunk_kimi_delta_attention": (*_RULE, "chunk_size", *_OPTIONS),
    "recurrent_kimi_delta_attention": (*_RULE, *_OPTIONS),
}
_CONVOLUTION = {
    "causal_conv1d_fn": ("hidden_states", "weight", "bias", "activation", "kwargs"),
    "causal_conv1d_update": ("hidden_states", "conv_state", "weight", "bias", "activation"),
}
"""The functions that are replaced, and the names of their parameters."""
