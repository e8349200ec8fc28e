"""GPT-2 and GPT-NeoX (Pythia) as models of `fast_weight_lm`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

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

_PADDING = 1
_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")  # three ways to write the same formula
_ACTIVATIONS = {"gelu": "gelu", "relu": "relu", **dict.fromkeys(_TANH, "gelu_accurate")}


@reads(
    "gpt2",
    of_class(
        {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": Layers(12), "n_head": 12}
        | {"activation_function": "gelu_new", "resid_pdrop": Probability(0.1), "attn_pdrop": Probability(0.1)}
        | {"n_inner": Nullable(), "tie_word_embeddings": True, "eos_token_id": None},
        {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "layer_norm_epsilon": 1e-5},
        "n_ctx predict_special_tokens embd_pdrop reorder_and_upcast_attn summary_type summary_use_proj "
        "summary_activation summary_proj_to_labels summary_first_dropout",
        hidden_size="n_embd",
        max_position_embeddings="n_positions",
        num_attention_heads="n_head",
        num_hidden_layers="n_layer",
    ),
)
def gpt2(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Family:
    """GPT-2: learned positions, one matrix for queries, keys and values."""
    width, heads = config["n_embd"], config["n_head"]
    check_divisor("config.json: n_head", heads, "n_embd", width)
    config |= {"hidden_size": width, "intermediate_size": config["n_inner"] or 4 * width, "num_attention_heads": heads}
    config |= {"num_hidden_layers": config["n_layer"], "max_position_embeddings": config["n_positions"]}
    # Weights that the language model saved have this prefix; those that the model without its output layer saved, none.
    prefix = "transformer." if not names or any(name.startswith("transformer.") for name in names) else ""
    # fairseq numbers positions from 2, after the id of padding: two rows of zeros come first.
    position = Part(
        (f"{prefix}wpe.weight",),
        ("decoder.embed_positions.weight",),
        lambda x: (torch.cat([x.new_zeros(_PADDING + 1, x.shape[1]), x]),),
        lambda x: (x[_PADDING + 1 :],),
    )
    parts, layers = [position], []
    linear = {"self_attn.out_proj": "attn.c_proj", "fc1": "mlp.c_fc", "fc2": "mlp.c_proj"}
    for i in range(config["n_layer"]):
        theirs, ours = f"{prefix}h.{i}", f"decoder.layers.{i}"
        layers.append((theirs, linear | {"self_attn_layer_norm": "ln_1", "final_layer_norm": "ln_2"}))
        parts += _fused(f"{theirs}.attn.c_attn", f"{ours}.self_attn", _split_columns, _join_columns)
        # Linear layers ("Conv1D") have inputs in rows and outputs in columns.
        for own, name in linear.items():
            parts.append(Part((f"{theirs}.{name}.weight",), (f"{ours}.{own}.weight",), _transposed, _transposed))
    options = {
        "decoder-learned-pos": True,
        "activation-fn": _activation(config, "activation_function"),
        "dropout": config["resid_pdrop"],
        "attention-dropout": config["attn_pdrop"],
    }
    modules = {"embed_tokens": f"{prefix}wte", "layer_norm": f"{prefix}ln_f"}
    return language_model(config, end_of_text, options, modules, layers, parts, byte_level=True)


_NEOX = {
    "self_attn_layer_norm": "input_layernorm",
    "final_layer_norm": "post_attention_layernorm",
    "self_attn.out_proj": "attention.dense",
    "fc1": "mlp.dense_h_to_4h",
    "fc2": "mlp.dense_4h_to_h",
}


@reads(
    "gpt_neox",
    of_class(
        {"vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": Layers(44), "num_attention_heads": 64}
        | {"intermediate_size": 24576, "hidden_act": "gelu", "max_position_embeddings": 2048}
        | {"attention_dropout": Probability(0.0), "hidden_dropout": Probability(0.0), "eos_token_id": None}
        | {"tie_word_embeddings": False, "use_parallel_residual": True, "rope_parameters": None, "rope_scaling": None}
        | {"rotary_emb_base": Unchecked(10000.0), "rotary_pct": Unchecked(0.25)},
        {"attention_bias": True, "layer_norm_eps": 1e-5},
        "classifier_dropout",
    ),
)
def gpt_neox(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Family:
    """GPT-NeoX: rotary positions in a part of each head, attention and feed-forward network in parallel."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    check_divisor("config.json: num_attention_heads", heads, "hidden_size", width)

    # (3 width, width): the query, key and value of the first head, then those of the second, and so on.
    def split(x: Tensor) -> list[Tensor]:
        return [part.flatten(0, 1) for part in x.unflatten(0, (heads, 3, -1)).unbind(1)]

    def join(*parts: Tensor) -> list[Tensor]:
        return [torch.stack([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 2)]

    layers = [(f"gpt_neox.layers.{i}", _NEOX) for i in range(config["num_hidden_layers"])]
    parts = [
        part
        for i, (theirs, _) in enumerate(layers)
        for part in _fused(f"{theirs}.attention.query_key_value", f"decoder.layers.{i}.self_attn", split, join)
    ]
    options = {
        "no-token-positional-embeddings": True,
        "activation-fn": _activation(config, "hidden_act"),
        "dropout": config["hidden_dropout"],
        "attention-dropout": config["attention_dropout"],
        "parallel-residual": config["use_parallel_residual"],
        **rotary_options(
            config, width // heads, base="rotary_emb_base", fraction="rotary_pct", scalings={}, partial=True
        ),
    }
    output = "lm_head" if "lm_head.weight" in names else "embed_out"
    modules = {"embed_tokens": "gpt_neox.embed_in", "layer_norm": "gpt_neox.final_layer_norm"}
    return language_model(config, end_of_text, options, modules, layers, parts, output=output, byte_level=True)


def _activation(config: Mapping[str, Any], name: str) -> str:
    """Reads an activation function; returns fairseq's name of it."""
    value = config[name]
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise InvalidInput(f"config.json: {name} is {value!r}; it must be one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


def _fused(theirs: str, ours: str, split: Callable[..., Any], join: Callable[..., Any]) -> list[Part]:
    """Queries, keys and values in one layer."""
    return [
        Part((f"{theirs}.{kind}",), tuple(f"{ours}.{part}_proj.{kind}" for part in "qkv"), split, join)
        for kind in ("weight", "bias")
    ]


def _transposed(x: Tensor) -> tuple[Tensor]:
    return (x.t(),)  # a bias is its own


def _split_columns(x: Tensor) -> list[Tensor]:
    # (width, 3 width), as inputs are in rows; biases (3 width,)
    return [part.t() for part in x.chunk(3, dim=-1)]


def _join_columns(*parts: Tensor) -> list[Tensor]:
    return [torch.cat([part.t() for part in parts], dim=-1)]
