"""Random models in the shape of SmolLM2-135M: transformers' class, and models that are converted from it."""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from fairseq_fastweights.huggingface import FastWeightConfig, FastWeightForCausalLM, GenerationStep
from fairseq_fastweights.mixers.registry import parse_pattern, settings_read

SMOLLM2 = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
SMOLLM2 |= {"num_attention_heads": 9, "num_key_value_heads": 3}
TINY = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 5}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1}
_BASE, _EPS = 100000.0, 1e-5
# Mixers of converted layers with their settings, as in examples/papers/scaled.py.
MEMORIES: dict[str, dict[str, Any]] = {
    "gated-delta": {"gated_delta_bias": True},
    "window-sum": {},
    "delta": {"feature_map": "relu", "normalization": ["sum"]},
}
EVERY = 5  # in a hybrid every fifth layer has linear attention
_NAMES = {
    **{"self_attn.o_proj": "self_attn.out_proj", "input_layernorm": "self_attn_layer_norm"},
    **{"post_attention_layernorm": "final_layer_norm", "mlp.gate_proj": "fc1.gate", "mlp.up_proj": "fc1.linear"},
    **{"mlp.down_proj": "fc2", "model.norm": "model.layer_norm"},
}


def llama(sizes: dict[str, int]) -> LlamaForCausalLM:
    """The base model, as transformers' class."""
    config = LlamaConfig(
        **sizes,
        rms_norm_eps=_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": _BASE},
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def converted(source: LlamaForCausalLM, mixer: str, layers: str) -> FastWeightForCausalLM:
    """The base model in this package, with `mixer` in these layers; both share the weights of the base model."""
    theirs, head_dim = source.config, source.config.hidden_size // source.config.num_attention_heads
    rotary = {"rotary_dim": head_dim, "rotary_base": _BASE}
    shape = {"kv_heads": theirs.num_key_value_heads, "projection_bias": "none", **rotary}
    shape |= {"gated_delta_kv_heads": theirs.num_key_value_heads, "gated_delta_gate_rank": head_dim}
    shape |= MEMORIES[mixer] if layers else {}
    mixers = parse_pattern(f"softmax,{mixer}:{layers}" if layers else "softmax", theirs.num_hidden_layers)
    read = {setting for name in mixers for setting in settings_read(name, shape)}
    config = FastWeightConfig(
        **{name: getattr(theirs, name) for name in SMOLLM2 if name != "num_key_value_heads"},
        mixers=list(mixers),
        mixer_settings={name: value for name, value in shape.items() if name in read},
        position_embeddings="none",
        rms_norm_eps=_EPS,
        swiglu=True,
        scale_embeddings=False,
        dropout=0.0,
    )
    # No weights are allocated: all are taken from the base model or drawn below.
    with torch.device("meta"):
        model = FastWeightForCausalLM(config)
    taken = {_our_name(name): x for name, x in source.state_dict().items()}
    wanted = {name: x.shape for name, x in model.state_dict().items()}
    taken = {name: x for name, x in taken.items() if wanted.get(name) == x.shape}
    new = {name: 0.02 * torch.randn(shape, device=source.device) for name, shape in wanted.items() if name not in taken}
    model.load_state_dict(taken | new, assign=True)
    model.tie_weights()
    return model.eval().requires_grad_(False)


def _our_name(name: str) -> str:
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    return name


def layers_of(sizes: dict[str, int]) -> dict[str, str]:
    """By name the layers that are converted, in the form of a mixer pattern."""
    last = sizes["num_hidden_layers"]
    some = range(EVERY, last + 1, EVERY)
    return {f"in {len(some)} of {last} layers": ",".join(map(str, some)), "in all layers": f"1-{last}"}


def compiled(model: FastWeightForCausalLM, backend: str = "inductor") -> Any:
    """A compiled decode step; the first call compiles."""
    return torch.compile(GenerationStep(model), backend=backend)


class Generation:
    """Decodes `batch` texts after `length` tokens, 2 at least.

    KV caches are filled with random keys and values. The state of linear attention has one size at any length; it
    comes from two tokens. `step` is a model, or the result of `compiled`.
    """

    def __init__(self, step: Any, batch: int, length: int) -> None:
        self._step, self._in_graph = step, not isinstance(step, PreTrainedModel)
        model = step.model if self._in_graph else step
        words = model.config.vocab_size
        self._token = torch.randint(4, words, (batch, 1), device=model.device)
        with torch.no_grad():
            text = torch.randint(4, words, (batch, 2), device=model.device)
            self.cache = model(text, use_cache=True).past_key_values
        for layer in self.cache.layers:
            if not hasattr(layer, "state"):  # transformers' own cache
                layer.keys, layer.values = (_longer(x, length) for x in (layer.keys, layer.values))
            elif set(layer.state) == {"keys", "values"}:
                layer.state = {name: _longer(x, length) for name, x in layer.state.items()}
            elif "read" in layer.state:  # window-sum counts its tokens
                layer.state["read"].fill_(length)
        if hasattr(self.cache, "advance"):
            self.cache.advance(length - 2, torch.full((batch,), length, device=model.device))
        self._states = GenerationStep.begin(self.cache) if self._in_graph else None

    def advance(self) -> Tensor:
        """A decode step; returns its logits, (batch, vocabulary)."""
        with torch.no_grad():
            if self._in_graph:
                logits, *self._states = self._step(self._token, *self._states)
                return logits
            return self._step(self._token, past_key_values=self.cache, use_cache=True).logits[:, -1]


def _longer(x: Tensor, length: int) -> Tensor:
    return torch.randn(*x.shape[:2], length, x.shape[3], device=x.device)
