"""A layer of the model: a mixer and a feed-forward network, each with its layer norm and its residual connection."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer

from fairseq_fastweights.huggingface.cache import FastWeightCache, check_kind
from fairseq_fastweights.huggingface.configuration import FastWeightConfig
from fairseq_fastweights.llama_layers import use_rms_norms, use_swiglu
from fairseq_fastweights.mixers.registry import build_mixer


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """fairseq's activation function of this name."""
    tanh = partial(F.gelu, approximate="tanh")
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_accurate": tanh,
        "gelu_fast": tanh,
        "tanh": torch.tanh,
        "linear": lambda x: x,
    }
    return functions[name]


class FastWeightDecoderLayer(GradientCheckpointingLayer):
    """x + mixer(norm(x)), and then x + feed_forward(norm(x)); norms come after the sums without `config.pre_norm`.

    With `config.parallel_residual` it is x + mixer(norm_1(x)) + feed_forward(norm_2(x)); in the layers of
    `config.output_norm_layers`, x + norm(mixer(x)), and then x + norm(feed_forward(x)). Parameters have fairseq's
    names.

    Args:
        config: the model's.
        index: the layer's number, from 0.
    """

    def __init__(self, config: FastWeightConfig, index: int) -> None:
        super().__init__()
        width, between = config.hidden_size, config.intermediate_size
        assert isinstance(config.mixers, list)
        self.index = index
        self.pre_norm = config.pre_norm
        self.parallel_residual = config.parallel_residual
        self.output_norms = index + 1 in (config.output_norm_layers or ())
        self.self_attn = build_mixer(config.mixers[index], width, config.mixer_arguments())
        self.self_attn_layer_norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, between)
        self.fc2 = nn.Linear(between, width)
        self.final_layer_norm = nn.LayerNorm(width)
        self.activation_fn = activation(config.hidden_act)
        if config.swiglu:
            use_swiglu(self)
        if config.rms_norm_eps is not None:
            use_rms_norms(self, config.rms_norm_eps, config.zero_centered_norms)
        self.dropout_module = nn.Dropout(config.dropout)
        self.activation_dropout_module = nn.Dropout(config.activation_dropout)

    def __call__(self, *arguments: Any, past_key_values: FastWeightCache | None = None, **options: Any) -> Any:
        """Calls `forward`; a layer whose state is kept is not checkpointed, as that would compute it again from it."""
        if past_key_values is None:
            return super().__call__(*arguments, **options)
        check_kind(past_key_values)
        return nn.Module.__call__(self, *arguments, past_key_values=past_key_values, **options)

    def forward(
        self,
        hidden_states: Tensor,
        padding: Tensor | None = None,
        starts: Tensor | None = None,
        past_key_values: FastWeightCache | None = None,
    ) -> Tensor:
        """Mixes positions, and then works on each.

        Args:
            hidden_states: (batch, time, hidden_size).
            padding: (batch, time), true at padding; None for none.
            starts: (batch, time), true where a text begins, for mixers that take it; None for nowhere.
            past_key_values: the cache, in which the mixer's state is read and written.

        Returns:
            (batch, time, hidden_size).
        """
        x = hidden_states
        if self.parallel_residual:
            mixed = self._mix(self.self_attn_layer_norm(x), padding, starts, past_key_values)
            return x + mixed + self._feed_forward(self.final_layer_norm(x))
        if self.output_norms:
            x = x + self._mix(x, padding, starts, past_key_values, self.self_attn_layer_norm)
            return x + self._feed_forward(x, self.final_layer_norm)
        mixed = self._mix(self.self_attn_layer_norm(x) if self.pre_norm else x, padding, starts, past_key_values)
        x = x + mixed if self.pre_norm else self.self_attn_layer_norm(x + mixed)
        changed = self._feed_forward(self.final_layer_norm(x) if self.pre_norm else x)
        return x + changed if self.pre_norm else self.final_layer_norm(x + changed)

    def _mix(
        self, x: Tensor, padding: Tensor | None, starts: Tensor | None, cache: FastWeightCache | None, norm: Any = None
    ) -> Tensor:
        """The mixer's output, behind a norm if there is one there."""
        state = None if cache is None else cache.layers[self.index].state
        options = {} if starts is None else {"starts": starts}
        # What a graph of gradients goes through must stay as it is; the mixers look after that.
        mixed, state = self.self_attn(x.transpose(0, 1), state, padding, overwrite=True, **options)
        if cache is not None:
            cache.layers[self.index].state = state
        mixed = mixed.transpose(0, 1)
        return self.dropout_module(mixed if norm is None else norm(mixed))

    def _feed_forward(self, x: Tensor, norm: Any = None) -> Tensor:
        x = self.fc2(self.activation_dropout_module(self.activation_fn(self.fc1(x))))
        return self.dropout_module(x if norm is None else norm(x))
