"""OLMo-hybrid and Qwen3.5 as models of `fast_weight_lm`: Gated DeltaNet, and softmax attention in some layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from fairseq_fastweights.conversion.families.family import (
    FAMILIES,
    Family,
    Weight,
    plain,
    reads,
    same,
    single,
    stacked,
    unstacked,
)
from fairseq_fastweights.conversion.families.llama import ONLY, SHARED, Shape, read_shape, rotary_options
from fairseq_fastweights.conversion.families.settings import (
    Nullable,
    check_heads,
    layer_kinds,
    mapping,
    number,
    of_class,
)
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.registry import write_pattern

_MIXERS = {"linear_attention": "gated-delta", "full_attention": "softmax"}
_SECOND = "post_attention_layernorm"
_NORM_EPS = 1e-5
"""OLMo-hybrid's epsilon of the norm of a layer's output, independent of config.json."""
_PARTS = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
_OLMO: dict[str, Any] = {
    **{"vocab_size": 100352, "hidden_size": 3840, "intermediate_size": 11008, "num_attention_heads": 30},
    **{"max_position_embeddings": 65536, "head_dim": Nullable(), "layer_types": None, "linear_conv_kernel_dim": 4},
    **dict.fromkeys((f"linear_{part}" for part in _PARTS[:4]), Nullable()),
    "linear_allow_neg_eigval": True,
}
_QWEN: dict[str, Any] = {
    **{"vocab_size": 248320, "intermediate_size": 12288, "num_attention_heads": 16, "num_key_value_heads": Nullable(4)},
    **{"max_position_embeddings": 32768, "head_dim": Nullable(256), "layer_types": None, "full_attention_interval": 4},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.25},
}


class Delta(NamedTuple):
    """The sizes of a delta network: heads of keys and of values, their dimensions, the convolution's kernel."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    conv: int

    @property
    def rows(self) -> dict[str, int]:
        """The number of outputs of each projection; `a` gives the decay, `b` beta, `g` the output gate."""
        keys, values = self.key_heads * self.key_dim, self.heads * self.value_dim
        return {"q": keys, "k": keys, "v": values, "a": self.heads, "b": self.heads, "g": values}

    def options(self, mixer: str) -> dict[str, Any]:
        """The options of a mixer with these sizes."""
        sizes = {"key-heads": self.key_heads, "key-dim": self.key_dim, "value-dim": self.value_dim, "conv": self.conv}
        return {f"{mixer}-{name}": value for name, value in sizes.items()}

    def weights(
        self, width: int, theirs: str, ours: str, parts: str, convolved: tuple[int, ...] | None = None
    ) -> Iterator[Weight]:
        """The projections of these parts, the convolutions, the norm and the projection of the output.

        `convolved` are the channels of the three convolutions that the folder holds; None for those of q, k and v.
        """
        rows = self.rows
        shapes: dict[str, tuple[int, ...]] = {f"{part}_proj.weight": (rows[part], width) for part in parts}
        yield from same(theirs, ours, shapes)
        convolutions = tuple(f"{theirs}{part}_conv1d.weight" for part in "qkv")
        convolved = convolved or (rows["q"], rows["k"], rows["v"])
        yield stacked(convolutions, f"{ours}conv1d.weight", convolved, 1, self.conv)
        yield from same(theirs, ours, {"o_norm.weight": (self.value_dim,), "o_proj.weight": (width, rows["v"])})

    def decay_weights(self, theirs: str, ours: str) -> Iterator[Weight]:
        """Gated DeltaNet's parameters of decays, beside their projection."""
        return same(theirs, ours, {"A_log": (self.heads,), "dt_bias": (self.heads,)})


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

    Norms have either of two names. Folders that transformers 5.20 saved differ further: the first norm of layers with
    attention has the other name of the second one of the others, and the convolutions are cut into three equal parts.
    """
    config["full_attention_interval"] = min(4, config["num_hidden_layers"])
    # The defaults of OlmoHybridConfig: each depends on settings before it.
    sizes: dict[str, Callable[[], int]] = {
        "num_key_heads": lambda: config["num_attention_heads"],
        "num_value_heads": lambda: config["num_attention_heads"],
        "key_head_dim": lambda: 3 * config["hidden_size"] // (4 * config["linear_num_key_heads"]),
        "value_head_dim": lambda: 2 * config["linear_key_head_dim"],
    }
    for part, size in sizes.items():
        if config[f"linear_{part}"] is None:
            config[f"linear_{part}"] = size()
    shape, kinds, delta = _read(config, names, end_of_text)
    attention = kinds.index("full_attention") if "full_attention" in kinds else 0
    saved = f"{shape.prefix}layers.{attention}.feedforward_layer_norm.weight" in names
    older = any(name.endswith(".attention_layer_norm.weight") for name in names)
    before = ("attention_layer_norm", "feedforward_layer_norm") if older else ("input_layernorm", _SECOND)
    behind = ("feedforward_layer_norm" if saved else _SECOND, "post_feedforward_layernorm")
    # In folders that transformers saved, convolutions are thirds of the stacked one, whatever the sizes of q, k and v.
    channels = 2 * delta.rows["k"] + delta.rows["v"]
    third = -(-channels // 3)
    thirds = (third, third, channels - 2 * third)
    weights: list[Weight] = []
    for kind, (theirs, ours) in zip(kinds, shape.paths(), strict=True):
        weights += shape.feed_forward(theirs, ours)
        if kind == "linear_attention":
            weights += shape.norms(theirs, ours, *before)
            theirs, ours = f"{theirs}linear_attn.", f"{ours}self_attn."
            weights += delta.weights(shape.width, theirs, ours, "qkvabg", thirds if saved else None)
            weights += delta.decay_weights(theirs, ours)
            continue
        weights += shape.norms(theirs, ours, *behind)
        weights += shape.attention(f"{theirs}self_attn.", f"{ours}self_attn.")
        for part, heads in (("q", shape.heads), ("k", shape.kv_heads)):
            name = f"self_attn.{part}_norm.weight"
            weights.append(plain(f"{theirs}{name}", f"{ours}{name}", heads * shape.head_dim))
    options = {
        "softmax-joint-norm": True,
        "output-norm-layers": ",".join(str(i) for i, kind in enumerate(kinds, 1) if kind == "full_attention"),
        "gated-delta-negative-eigenvalues": config["linear_allow_neg_eigval"],
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
    for kind, (theirs, ours) in zip(kinds, shape.paths(), strict=True):
        weights += shape.norms(theirs, ours, "input_layernorm", _SECOND)
        weights += shape.feed_forward(theirs, ours)
        if kind == "linear_attention":
            weights += _qwen_delta(shape.width, delta, f"{theirs}linear_attn.", f"{ours}self_attn.")
            continue
        theirs, ours = f"{theirs}self_attn.", f"{ours}self_attn."
        weights.append(_gated_queries(shape, theirs, ours))
        weights += shape.attention(theirs, ours, projections="kv")
        weights += same(theirs, ours, {f"{part}_norm.weight": (shape.head_dim,) for part in "qk"})
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
    return FAMILIES["qwen3_5_text"](qwen3_5_text_config(config), names, end_of_text)


def qwen3_5_text_config(config: dict[str, Any]) -> dict[str, Any]:
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


def _read(config: dict[str, Any], names: set[str], end_of_text: int | None) -> tuple[Shape, list[str], Delta]:
    """The shape, the layers' kinds, and the sizes of Gated DeltaNet."""
    shape = read_shape(config, names, end_of_text)
    interval = config["full_attention_interval"]
    default = ["linear_attention" if i % interval else "full_attention" for i in range(1, shape.layers + 1)]
    kinds = layer_kinds(config, shape.layers, default, _MIXERS)
    delta = Delta(*(number(config, f"linear_{part}") for part in _PARTS))  # derived ones may be 0
    check_heads("linear_num_value_heads", delta.heads, "linear_num_key_heads", delta.key_heads)
    return shape, kinds, delta


def _qwen_delta(width: int, delta: Delta, theirs: str, ours: str) -> Iterator[Weight]:
    rows = delta.rows
    inputs = (rows["q"], rows["k"], rows["v"])
    yield unstacked(f"{theirs}in_proj_qkv.weight", tuple(f"{ours}{x}_proj.weight" for x in "qkv"), inputs, width)
    for part, own in (("z", "g"), ("b", "b"), ("a", "a")):
        yield plain(f"{theirs}in_proj_{part}.weight", f"{ours}{own}_proj.weight", rows[own], width)
    yield plain(f"{theirs}out_proj.weight", f"{ours}o_proj.weight", width, rows["v"])
    yield plain(f"{theirs}conv1d.weight", f"{ours}conv1d.weight", sum(inputs), 1, delta.conv)
    yield from delta.decay_weights(theirs, ours)
    yield plain(f"{theirs}norm.weight", f"{ours}o_norm.weight", delta.value_dim)


def _gated_queries(shape: Shape, theirs: str, ours: str) -> Weight:
    """Qwen3.5's projection to a query and a gate of the first head, a query and a gate of the second, and so on."""

    def split(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part.flatten(0, 1) for part in x.unflatten(0, (shape.heads, 2, shape.head_dim)).unbind(1))

    def join(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.stack([part.unflatten(0, (shape.heads, shape.head_dim)) for part in parts], 1).flatten(0, 2)

    names = f"{ours}q_proj.weight", f"{ours}output_gate_proj.weight"
    return single(f"{theirs}q_proj.weight", (2 * shape.heads * shape.head_dim, shape.width), names, split, join)


def _finish(shape: Shape, kinds: list[str], delta: Delta, weights: list[Weight], options: dict[str, Any]) -> Family:
    """The family, with the options of both."""
    common = {
        "mixers": write_pattern([_MIXERS[kind] for kind in kinds]),
        "fast-weight-heads": delta.heads,
        "query-key-norm-eps": shape.eps,
    }
    return shape.language_model(weights, common | delta.options("gated-delta") | options)
