"""OLMo-hybrid and Qwen3.5 as models of `fast_weight_lm`: Gated DeltaNet, and softmax attention in some layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fairseq_fastweights.conversion.families.family import Family, Part, stacked, unstacked
from fairseq_fastweights.conversion.families.llama import (
    ATTENTION,
    MLP,
    NORMS,
    ONLY,
    SHARED,
    Shape,
    layer_kinds,
    read_shape,
)
from fairseq_fastweights.conversion.families.settings import (
    Nullable,
    Unchecked,
    checked,
    mapping,
    of_class,
    rotary_options,
)
from fairseq_fastweights.conversion.families.table import WITHIN, read_family, reads
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.mixer import check_divisor
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
    **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "partial_rotary_factor": Unchecked(0.25)},
}


class Delta(NamedTuple):
    """The sizes of a delta network: heads of keys and of values, their dimensions, the convolution's kernel."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    conv: int

    @property
    def rows(self) -> tuple[int, int, int]:
        """The number of queries, keys and values."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.heads * self.value_dim

    def options(self, mixer: str) -> dict[str, Any]:
        """The options of a mixer with these sizes."""
        sizes = {"key-heads": self.key_heads, "key-dim": self.key_dim, "value-dim": self.value_dim, "conv": self.conv}
        return {f"{mixer}-{name}": value for name, value in sizes.items()}


def convolutions(theirs: str, ours: str, rows: tuple[int, ...]) -> Part:
    """Three convolutions that are one here."""
    return stacked([f"{theirs}.{part}_conv1d.weight" for part in "qkv"], f"{ours}.conv1d.weight", rows)


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
    shape, kinds, delta = _read(config, names)
    attention = kinds.index("full_attention") if "full_attention" in kinds else 0
    saved = f"{shape.prefix}layers.{attention}.feedforward_layer_norm.weight" in names
    older = any(name.endswith(".attention_layer_norm.weight") for name in names)
    # Linear attention is x + f(norm(x)), attention x + norm(f(x)).
    before = ("attention_layer_norm", "feedforward_layer_norm") if older else ("input_layernorm", _SECOND)
    behind = ("feedforward_layer_norm" if saved else _SECOND, "post_feedforward_layernorm")
    # In folders that transformers saved, convolutions are thirds of the stacked one, whatever the sizes of q, k and v.
    channels = sum(delta.rows)
    third = -(-channels // 3)
    rows = (third, third, channels - 2 * third) if saved else delta.rows
    modules = {
        "linear_attention": dict(zip(NORMS, before, strict=True)) | {"self_attn": "linear_attn"},
        "full_attention": dict(zip(NORMS, behind, strict=True)) | ATTENTION,
    }
    parts = [
        convolutions(f"{shape.prefix}layers.{i}.linear_attn", f"decoder.layers.{i}.self_attn", rows)
        for i, kind in enumerate(kinds)
        if kind == "linear_attention"
    ]
    options = {
        "softmax-joint-norm": True,
        "output-norm-layers": ",".join(str(i) for i, kind in enumerate(kinds, 1) if kind == "full_attention"),
        "gated-delta-negative-eigenvalues": config["linear_allow_neg_eigval"],
        "gated-delta-eps": _NORM_EPS,
    }
    # With null for a base there are no rotary embeddings, as in the published models; without one it is 10,000.
    given = mapping(config, "rope_scaling") or mapping(config, "rope_parameters")
    if given.get("rope_theta", config["rope_theta"]) is not None:
        options |= rotary_options(config, shape.head_dim)
    return _finish(shape, end_of_text, kinds, delta, options, modules, parts)


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
    shape, kinds, delta = _read(config, names)
    linear = {"g_proj": "in_proj_z", "b_proj": "in_proj_b", "a_proj": "in_proj_a", "o_proj": "out_proj"}
    linear |= {"o_norm": "norm"}
    modules = {
        "linear_attention": {f"self_attn.{own}": f"linear_attn.{name}" for own, name in linear.items()},
        "full_attention": ATTENTION,
    }
    modules["linear_attention"]["self_attn"] = "linear_attn"
    modules = {kind: own | dict(zip(NORMS, ("input_layernorm", _SECOND), strict=True)) for kind, own in modules.items()}
    parts = []
    for i, kind in enumerate(kinds):
        theirs, ours = f"{shape.prefix}layers.{i}", f"decoder.layers.{i}.self_attn"
        if kind == "full_attention":
            parts.append(_gated_queries(shape, f"{theirs}.self_attn.q_proj.weight", ours))
        else:
            inputs = [f"{ours}.{part}_proj.weight" for part in "qkv"]
            parts.append(unstacked(f"{theirs}.linear_attn.in_proj_qkv.weight", inputs, delta.rows))
    options = {
        "softmax-output-gate": True,
        "zero-centered-norms": True,
        "gated-delta-eps": shape.eps,
        **rotary_options(config, shape.head_dim, partial=True, unused=("mrope_section", "mrope_interleaved")),
    }
    return _finish(shape, end_of_text, kinds, delta, options, modules, parts)


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
    return read_family(_text_config(config), names, end_of_text)


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of the language model in a Qwen3.5 that also reads images, as if it had been saved alone."""
    text = mapping(config, "text_config")
    if not text:
        raise InvalidInput(f"config.json: text_config is {config.get('text_config')!r}; it must be an object")
    if (kind := text.get("model_type", "qwen3_5_text")) != "qwen3_5_text":
        raise InvalidInput(f"config.json: model_type of text_config is {kind!r}; only 'qwen3_5_text' is supported")
    own = {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}
    own["tie_word_embeddings"] = config.get("tie_word_embeddings", False)
    return {"eos_token_id": config.get("eos_token_id")} | text | own


def _text_name(name: str) -> str | None:
    """The name that a weight has if the language model is saved alone; None for those that are no part of it."""
    if name.startswith(("model.visual.", "mtp.")):  # images, and the prediction of several tokens at once
        return None
    return name.replace("model.language_model.", "model.", 1)


WITHIN |= {"qwen3_5": (_text_config, _text_name), "qwen3_5_text": (dict, _text_name)}


def _read(config: dict[str, Any], names: set[str]) -> tuple[Shape, list[str], Delta]:
    """The shape, the layers' kinds, and the sizes of Gated DeltaNet."""
    shape = read_shape(config, names)
    interval = config["full_attention_interval"]
    default = ["linear_attention" if i % interval else "full_attention" for i in range(1, shape.layers + 1)]
    kinds = layer_kinds(config, default, _MIXERS)
    # Those that were derived from others may be 0.
    delta = Delta(*(checked(name, config[name], 1) for name in (f"linear_{part}" for part in _PARTS)))
    check_divisor("config.json: linear_num_key_heads", delta.key_heads, "linear_num_value_heads", delta.heads)
    return shape, kinds, delta


def _gated_queries(shape: Shape, theirs: str, ours: str) -> Part:
    """Qwen3.5's projection to a query and a gate of the first head, a query and a gate of the second, and so on."""
    heads = (shape.heads, shape.head_dim)

    def split(x: torch.Tensor) -> list[torch.Tensor]:
        return [part.flatten(0, 1) for part in x.unflatten(0, (shape.heads, 2, shape.head_dim)).unbind(1)]

    def join(*parts: torch.Tensor) -> list[torch.Tensor]:
        return [torch.stack([part.unflatten(0, heads) for part in parts], 1).flatten(0, 2)]

    return Part((theirs,), (f"{ours}.q_proj.weight", f"{ours}.output_gate_proj.weight"), split, join)


def _finish(
    shape: Shape,
    end_of_text: int | None,
    kinds: list[str],
    delta: Delta,
    options: dict[str, Any],
    modules: dict[str, dict[str, str]],
    parts: list[Part],
) -> Family:
    """The family, with the options of both kinds of layers, and the modules of each kind."""
    common = {
        "mixers": write_pattern([_MIXERS[kind] for kind in kinds]),
        "fast-weight-heads": delta.heads,
        "query-key-norm-eps": shape.eps,
    }
    options = common | delta.options("gated-delta") | options
    return shape.language_model(end_of_text, options, [MLP | modules[kind] for kind in kinds], parts)
