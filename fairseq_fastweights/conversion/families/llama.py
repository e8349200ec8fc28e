"""Llama, Mistral, Qwen2 and Qwen3 as models of `fast_weight_lm`: RMS norms, SwiGLU, grouped keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fairseq_fastweights.conversion.families.family import Family, Part, language_model
from fairseq_fastweights.conversion.families.settings import (
    Layers,
    Nullable,
    Probability,
    Unchecked,
    of_class,
    rotary_options,
)
from fairseq_fastweights.conversion.families.table import reads
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.mixer import check_divisor

SHARED: dict[str, Any] = {
    **{"hidden_size": 4096, "num_hidden_layers": Layers(32), "num_attention_heads": 32, "eos_token_id": None},
    **{"num_key_value_heads": Nullable(), "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    **{"attention_dropout": Probability(0.0), "rope_parameters": None, "rope_scaling": None},
    **{"rope_theta": Unchecked(10000.0), "partial_rotary_factor": None},
}
"""The values that Llama's descendants take for missing settings; most have some of their own."""
ONLY = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
_LLAMA = SHARED | {
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "head_dim": Nullable(),
}
_MISTRAL = _LLAMA | {"intermediate_size": 14336, "max_position_embeddings": 131072, "num_key_value_heads": Nullable(8)}
_QWEN = SHARED | {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": Nullable(32)}
_QWEN |= {"max_position_embeddings": 32768, "layer_types": None}
_QWEN2, _QWEN3 = (_QWEN | {"head_dim": Nullable(size)} for size in (None, 128))
_FULL = {"hidden_act": "silu", "use_sliding_window": False}
_WINDOWS = "sliding_window max_window_layers"

MLP = {"fc1.gate": "mlp.gate_proj", "fc1.linear": "mlp.up_proj", "fc2": "mlp.down_proj"}
"""SwiGLU networks' modules, here and in the folder."""
ATTENTION = {"self_attn.out_proj": "self_attn.o_proj"}
"""The module of attention that has another name in the folder."""
NORMS = "self_attn_layer_norm", "final_layer_norm"
_LAYER = MLP | ATTENTION | dict(zip(NORMS, ("input_layernorm", "post_attention_layernorm"), strict=True))


@dataclass(frozen=True)
class Shape:
    """The sizes that Llama's descendants share.

    Attributes:
        config: all settings.
        width, layers, heads, kv_heads, head_dim: sizes.
        eps: of the norms.
        prefix: of the weights' names.
    """

    config: dict[str, Any]
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    prefix: str

    def language_model(
        self,
        end_of_text: int | None,
        options: dict[str, Any],
        layers: Iterable[Mapping[str, str]],
        parts: Sequence[Part] = (),
        table: str = "embed_tokens",
    ) -> Family:
        """The family of a model with these modules in its layers, and these options beside those that all have."""
        modules = {"embed_tokens": f"{self.prefix}{table}", "layer_norm": f"{self.prefix}norm"}
        named = ((f"{self.prefix}layers.{i}", own) for i, own in enumerate(layers))
        common: dict[str, Any] = {
            "no-token-positional-embeddings": True,
            "dropout": 0.0,
            "attention-dropout": self.config["attention_dropout"],
            "rms-norm-eps": self.eps,
            "swiglu": True,
            "projection-bias": "none",
        }
        # fairseq's defaults are left out, so that options stay as short as those of other models.
        if self.kv_heads != self.heads:
            common["kv-heads"] = self.kv_heads
        if self.head_dim * self.heads != self.width:
            common["head-dim"] = self.head_dim
        return language_model(self.config, end_of_text, common | options, modules, named, parts)


def read_shape(config: dict[str, Any], names: set[str]) -> Shape:
    """Reads the sizes of Llama's descendants."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"] or heads
    check_divisor("config.json: num_key_value_heads", kv_heads, "num_attention_heads", heads)
    if config["head_dim"] is None:
        check_divisor("config.json: num_attention_heads", heads, "hidden_size", width)
    # The prefix is that of the language model; the model without its output layer saves names without it.
    prefix = "model." if not names or any(name.startswith("model.") for name in names) else ""
    head_dim, eps = config["head_dim"] or width // heads, config["rms_norm_eps"]
    return Shape(config, width, config["num_hidden_layers"], heads, kv_heads, head_dim, eps, prefix)


def layer_kinds(config: Mapping[str, Any], default: list[str], allowed: Iterable[str]) -> list[str]:
    """Reads layer_types, the kind of each layer; null stands for `default`."""
    kinds = default if config["layer_types"] is None else config["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != len(default) or not all(kind in [*allowed] for kind in kinds):
        raise InvalidInput(
            f"config.json: layer_types is {kinds!r:.200}; it must hold one of {', '.join(allowed)} for each of "
            f"{len(default)} layers"
        )
    return kinds


def _read(
    config: dict[str, Any], names: set[str], end_of_text: int | None, *, biased: bool = False, normed: bool = False
) -> Family:
    """Llama 1 to 3 and models of its shape; Qwen2's queries, keys and values have biases, Qwen3's q and k norms."""
    shape = read_shape(config, names)
    # Qwen's may say sliding_attention, which is refused.
    if "layer_types" in config:
        layer_kinds(config, ["full_attention"] * shape.layers, ["full_attention"])
    options = rotary_options(config, shape.head_dim) | {"projection-bias": "qkv" if biased else "none"}
    options |= {"query-key-norm-eps": shape.eps} if normed else {}
    return shape.language_model(end_of_text, options, [_LAYER] * shape.layers)


_LLAMA_ONLY = ONLY | {"sliding_window": None, "is_llama_config": True, "rope_interleaved": False}
_MISTRAL_SETTINGS = of_class(_MISTRAL | {"sliding_window": Nullable(4096)}, ONLY | {"sliding_window": None})
_QWEN2_ONLY = _FULL | {"use_mrope": False}
reads("llama", of_class(_LLAMA, _LLAMA_ONLY, "pretraining_tp max_sequence_length"), served=True)(_read)
reads("mistral", _MISTRAL_SETTINGS, served=True)(_read)
reads("qwen2", of_class(_QWEN2, _QWEN2_ONLY, _WINDOWS), served=True)(partial(_read, biased=True))
reads("qwen3", of_class(_QWEN3, ONLY | _FULL, _WINDOWS), served=True)(partial(_read, normed=True))
