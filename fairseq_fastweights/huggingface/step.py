"""A step of generation as a function of tensors, which `torch.export` takes."""

from __future__ import annotations

from torch import Tensor, nn

from fairseq_fastweights.huggingface.cache import FastWeightCache, check_kind, check_whole
from fairseq_fastweights.huggingface.modeling import FastWeightForCausalLM
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.mixer import State


class GenerationStep(nn.Module):
    """Reads one token of each row, with the states of the layers as inputs and outputs in the place of a cache.

    The states of linear attention do not grow, so that `torch.export` makes one program for all steps. A KV cache
    grows, and an exported step would be for texts of one length.

    Args:
        model: the model, in evaluation mode.

    Examples:
        >>> import torch
        >>> from fairseq_fastweights.huggingface import FastWeightConfig
        >>> config = FastWeightConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
        >>> model = FastWeightForCausalLM(config).eval().requires_grad_(False)
        >>> read, states = GenerationStep.begin(model(torch.tensor([[2, 5, 6]])).past_key_values)
        >>> token = torch.tensor([[7]])
        >>> step = torch.export.export(GenerationStep(model), (token, read, states)).module()
        >>> for _ in range(3):
        ...     logits, read, states = step(token, read, states)
        ...     token = logits.argmax(-1, keepdim=True)
        >>> logits.shape, read
        (torch.Size([1, 40]), tensor([6]))
    """

    def __init__(self, model: FastWeightForCausalLM) -> None:
        super().__init__()
        if not isinstance(model, FastWeightForCausalLM):
            raise InvalidInput(f"model is a {type(model).__name__}; it must be a FastWeightForCausalLM")
        self.model = model

    @staticmethod
    def begin(cache: FastWeightCache) -> tuple[Tensor, list[State]]:
        """The states for the first step after a text, from the cache that a call of the model returned for it."""
        if check_kind(cache, "cache").read is None:
            raise InvalidInput("cache is empty; it must be that of a text, which a call of the model returned")
        assert cache.read is not None
        return cache.read, [layer.state for layer in cache.layers]

    def forward(self, token: Tensor, read: Tensor, states: list[State]) -> tuple[Tensor, Tensor, list[State]]:
        """Reads a token.

        Args:
            token: (batch, 1).
            read: (batch,), the number of tokens that each row has read.
            states: of the layers' mixers; they may be overwritten.

        Returns:
            (batch, vocab_size), the logits of the next token; and `read` and `states` for the next step.
        """
        layers = len(self.model.model.layers)
        if not isinstance(states, (list, tuple)) or [type(state) for state in states] != [dict] * layers:
            raise InvalidInput(
                f"states is a {type(states).__name__}; it must be a list with a state for each of {layers} layers, as "
                "that of begin"
            )
        check_whole("token", token, dims=2)
        check_whole("read", read, dims=1)
        # Made anew at each step: an exported program keeps no objects between its calls.
        cache = FastWeightCache(layers)
        cache.read = read
        for layer, state in zip(cache.layers, states, strict=True):
            layer.state = state
        logits = self.model(token, past_key_values=cache, use_cache=True).logits
        return logits[:, -1], *self.begin(cache)
