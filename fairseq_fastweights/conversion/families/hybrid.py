"""OLMo-hybrid and Qwen3.5 as models of `fast_weight_lm`: Gated DeltaNet, and softmax attention in some layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fairseq_fastweights.conversion.families.config_values import (
    check_heads,
    count_layers,
    flag,
    layer_kinds,
    mapping,
    number,
    of_class,
)
from fairseq_fastweights.conversion.families.family import FAMILIES, Family, reads
from fairseq_fastweights.conversion.families.llama import ONLY, SHARED, Shape, read_shape, rotary_options
from fairseq_fastweights.conversion.families.weights import Weight, plain, single, stacked, unstacked
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.registry import write_pattern

_MIXERS = {"linear_attention": "gated-delta", "full_attention": "softmax"}
_SECOND = "post_attention_layernorm"
_NORM_EPS = 1e-5
"""OLMo-hybrid's epsilon of the norm of what is read, whatever config.json says of other norms."""
_OLMO: dict[str, Any] = {
    "vocab_size": 100352,
    "hidden_size": 3840,
    "intermediate_size": 11008,
    "num_attention_heads": 30,
}
_OLMO |= {"max_position_embeddings": 65536, "head_dim": None, "layer_types": None, "linear_conv_kernel_dim": 4}
_OLMO |= dict.fromkeys(f"linear_{name}" for name in ("num_key_heads", "num_value_heads"))
_OLMO |= {"linear_key_head_dim": None, "linear_value_head_dim": None, "linear_allow_neg_eigval": True}
_QWEN: dict[str, Any] = {
    "vocab_size": 248320,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
_QWEN |= {"max_position_embeddings": 32768, "head_dim": 256, "layer_types": None, "full_attention_interval": 4}
_QWEN |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128}
_QWEN |= {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.25}


@reads(
    "olmo_hybrid",
    of_class(
        SHARED | _OLMO,
        ONLY,
        "linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max linear_dt_init_floor",
    ),
    served=True,
)
def olmo_hybrid(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Family:
    """OLMo-hybrid: layers with attention have norms behind their parts, and one norm for all heads of queries.

    Norms have either of two names. What transformers 5.20 saves differs further: the first norm of layers with
    attention has the other name of the second one of the others, and the convolutions are cut into three equal parts.
    """
    config["full_attention_interval"] = min(4, count_layers(config, "num_hidden_layers"))
    for part, size in (
        ("num_key_heads", lambda: config["num_attention_heads"]),
        ("num_value_heads", lambda: config["num_attention_heads"]),
        ("key_head_dim", lambda: 3 * number(config, "hidden_size") // (4 * number(config, "linear_num_key_heads"))),
        ("value_head_dim", lambda: 2 * number(config, "linear_key_head_dim")),
    ):
        if config[f"linear_{part}"] is None:
            config[f"linear_{part}"] = size()
    shape, kinds, delta = _read(config, names, end_of_text)
    attention = kinds.index("full_attention") if "full_attention" in kinds else 0
    saved = f"{shape.prefix}layers.{attention}.feedforward_layer_norm.weight" in names
    older = any(name.endswith(".attention_layer_norm.weight") for name in names)
    before = ("attention_layer_norm", "feedforward_layer_norm") if older else ("input_layernorm", _SECOND)
    behind = ("feedforward_layer_norm" if saved else _SECOND, "post_feedforward_layernorm")
    weights: list[Weight] = []
    for i, kind in enumerate(kinds):
        theirs, ours = f"{shape.prefix}layers.{i}.", f"decoder.layers.{i}."
        weights += shape.feed_forward(theirs, ours)
        if kind == "linear_attention":
            weights += shape.norms(theirs, ours, *before)
            weights += _olmo_delta(shape.width, delta, f"{theirs}linear_attn.", f"{ours}self_attn.", saved)
            continue
        weights += shape.norms(theirs, ours, *behind)
        weights += shape.attention(f"{theirs}self_attn.", f"{ours}self_attn.")
        for part, heads in (("q", shape.heads), ("k", shape.kv_heads)):
            name = f"self_attn.{part}_norm.weight"
            weights.append(plain(f"{theirs}{name}", f"{ours}{name}", heads * shape.head_dim))
    options = {
        "softmax-joint-norm": True,
        "output-norm-layers": ",".join(str(i) for i, kind in enumerate(kinds, 1) if kind == "full_attention"),
        "gated-delta-negative-eigenvalues": flag(config, "linear_allow_neg_eigval"),
        "gated-delta-eps": _NORM_EPS,
    }
    # With null for a base there are no rotary embeddings, as in the published models; without one it is 10,000.
    given = mapping(config, "rope_scaling") or mapping(config, "rope_parameters")
    if given.get("rope_theta", config["rope_theta"]) is not None:
        options |= rotary_options(shape)
    return _finish(shape, kinds, delta, weights, options)


@reads(
    "qwen3_5_text",
    of_class(
        SHARED | _QWEN,
        ONLY | {"attn_output_gate": True, "output_gate_type": "swish", "mlp_only_layers": []},
        "mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings",
    ),
    served=True,
)
def qwen3_5_text(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Family:
    """The dense language models of Qwen3.5: gated attention, norms that multiply by 1 + w."""
    shape, kinds, delta = _read(config, names, end_of_text)
    weights: list[Weight] = []
    for i, kind in enumerate(kinds):
        theirs, ours = f"{shape.prefix}layers.{i}.", f"decoder.layers.{i}."
        weights += shape.norms(theirs, ours, "input_layernorm", _SECOND)
        weights += shape.feed_forward(theirs, ours)
        if kind == "linear_attention":
            weights += _qwen_delta(shape.width, delta, f"{theirs}linear_attn.", f"{ours}self_attn.")
            continue
        theirs, ours = f"{theirs}self_attn.", f"{ours}self_attn."
        weights.append(_gated_queries(shape, theirs, ours))
        weights += shape.attention(theirs, ours, projections="kv")
        weights += [plain(f"{theirs}{part}_norm.weight", f"{ours}{part}_norm.weight", shape.head_dim) for part in "qk"]
    options = {
        "softmax-output-gate": True,
        "zero-centered-norms": True,
        "gated-delta-eps": shape.eps,
        **rotary_options(shape, partial=True, unused=("mrope_section", "mrope_interleaved")),
    }
    return _finish(shape, kinds, delta, weights, options)


@reads(
    "qwen3_5",
    of_class(
        {"text_config": None, "tie_word_embeddings": False, "eos_token_id": None},
        unused="vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id "
        "language_model_only",
    ),
)
def qwen3_5(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Family:
    """The language model of a Qwen3.5 that also reads images; weights have the names that they have alone."""
    return FAMILIES["qwen3_5_text"](qwen3_5_alone(config), names, end_of_text)


def qwen3_5_alone(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of the language model in a Qwen3.5 that also reads images, as if it had been saved alone."""
    text = mapping(config, "text_config")
    if not text:
        raise InvalidInput(f"config.json: text_config is {config.get('text_config')!r}; it must be an object")
    if (kind := text.get("model_type", "qwen3_5_text")) != "qwen3_5_text":
        raise InvalidInput(f"config.json: model_type of text_config is {kind!r}; only 'qwen3_5_text' is supported")
    own = {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}
    own["tie_word_embeddings"] = config.get("tie_word_embeddings", False)
    return {"eos_token_id": config.get("eos_token_id")} | text | own


def qwen3_5_name(name: str) -> str | None:
    """The name that a weight has if the language model is saved alone; None for those that are no part of it."""
    if name.startswith(("model.visual.", "mtp.")):  # images, and the prediction of several tokens at once
        return None
    return name.replace("model.language_model.", "model.", 1)


def _read(
    config: dict[str, Any], names: set[str], end_of_text: int | None
) -> tuple[Shape, list[str], tuple[int, int, int, int, int]]:
    """The shape, the layers' kinds, and of Gated DeltaNet heads and sizes of keys and values, and the convolution."""
    shape = read_shape(config, names, end_of_text)
    interval = number(config, "full_attention_interval")
    default = ["linear_attention" if i % interval else "full_attention" for i in range(1, shape.layers + 1)]
    kinds = layer_kinds(config, shape.layers, default, _MIXERS)
    key_heads, value_heads, key_dim, value_dim, conv = (
        number(config, f"linear_{name}")
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    )
    check_heads("linear_num_value_heads", value_heads, "linear_num_key_heads", key_heads)
    return shape, kinds, (key_heads, value_heads, key_dim, value_dim, conv)


def _olmo_delta(width: int, delta: tuple[int, ...], theirs: str, ours: str, saved: bool) -> Iterator[Weight]:
    key_heads, value_heads, key_dim, value_dim, conv = delta
    keys, values = key_heads * key_dim, value_heads * value_dim
    for part, rows in (("q", keys), ("k", keys), ("v", values), ("a", value_heads), ("b", value_heads), ("g", values)):
        yield plain(f"{theirs}{part}_proj.weight", f"{ours}{part}_proj.weight", rows, width)
    yield plain(f"{theirs}o_proj.weight", f"{ours}o_proj.weight", width, values)
    channels = 2 * keys + values
    third = -(-channels // 3)
    parts = (third, third, channels - 2 * third) if saved else (keys, keys, values)
    convolutions = tuple(f"{theirs}{part}_conv1d.weight" for part in "qkv")
    yield stacked(convolutions, f"{ours}conv1d.weight", parts, 1, conv)
    yield from _delta_parameters(value_heads, value_dim, theirs, ours, norm="o_norm")


def _qwen_delta(width: int, delta: tuple[int, ...], theirs: str, ours: str) -> Iterator[Weight]:
    key_heads, value_heads, key_dim, value_dim, conv = delta
    rows = (key_heads * key_dim, key_heads * key_dim, value_heads * value_dim)
    yield unstacked(f"{theirs}in_proj_qkv.weight", tuple(f"{ours}{x}_proj.weight" for x in "qkv"), rows, width)
    for part, own, n in (("z", "g", rows[2]), ("b", "b", value_heads), ("a", "a", value_heads)):
        yield plain(f"{theirs}in_proj_{part}.weight", f"{ours}{own}_proj.weight", n, width)
    yield plain(f"{theirs}out_proj.weight", f"{ours}o_proj.weight", width, rows[2])
    yield plain(f"{theirs}conv1d.weight", f"{ours}conv1d.weight", sum(rows), 1, conv)
    yield from _delta_parameters(value_heads, value_dim, theirs, ours, norm="norm")


def _delta_parameters(heads: int, dim: int, theirs: str, ours: str, norm: str) -> Iterator[Weight]:
    """The parameters of Gated DeltaNet that are neither projections nor convolutions."""
    yield plain(f"{theirs}A_log", f"{ours}A_log", heads)
    yield plain(f"{theirs}dt_bias", f"{ours}dt_bias", heads)
    yield plain(f"{theirs}{norm}.weight", f"{ours}o_norm.weight", dim)


def _gated_queries(shape: Shape, theirs: str, ours: str) -> Weight:
    """Qwen3.5's projection to a query and a gate of the first head, a query and a gate of the second, and so on."""

    def split(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part.flatten(0, 1) for part in x.unflatten(0, (shape.heads, 2, shape.head_dim)).unbind(1))

    def join(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.stack([part.unflatten(0, (shape.heads, shape.head_dim)) for part in parts], 1).flatten(0, 2)

    names = f"{ours}q_proj.weight", f"{ours}output_gate_proj.weight"
    return single(f"{theirs}q_proj.weight", (2 * shape.heads * shape.head_dim, shape.width), names, split, join)


def _finish(
    shape: Shape, kinds: list[str], delta: tuple[int, ...], weights: list[Weight], options: dict[str, Any]
) -> Family:
    """The family, with the options of both."""
    key_heads, value_heads, key_dim, value_dim, conv = delta
    of_delta = {"key-heads": key_heads, "key-dim": key_dim, "value-dim": value_dim, "conv": conv}
    family = shape.family(
        weights,
        {
            "mixers": write_pattern([_MIXERS[kind] for kind in kinds]),
            "fast-weight-heads": value_heads,
            "query-key-norm-eps": shape.eps,
            **{f"gated-delta-{name}": value for name, value in of_delta.items()},
            **options,
        },
    )
    del family.options["softmax-attention-layers"]
    return family
