"""Models of flash-linear-attention as models of `fast_weight_lm`, with softmax attention in the layers that have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from fairseq_fastweights.conversion.families.config_values import (
    Settings,
    check_heads,
    flag,
    mapping,
    number,
    of_class,
    positive,
)
from fairseq_fastweights.conversion.families.family import Family, reads
from fairseq_fastweights.conversion.families.llama import SHARED, Shape, read_shape, rotary_options
from fairseq_fastweights.conversion.families.weights import Weight, plain, single, stacked, unstacked
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.gated_linear_attention import GatedLinearAttention
from fairseq_fastweights.mixers.registry import write_pattern

_SAME = "hidden_size num_hidden_layers vocab_size tie_word_embeddings eos_token_id max_position_embeddings".split()
_SHARED: dict[str, Any] = {
    **{"hidden_size": 2048, "num_hidden_layers": 24, "vocab_size": 32000, "tie_word_embeddings": False},
    **{"eos_token_id": None, "max_position_embeddings": 2048, "hidden_ratio": 4, "intermediate_size": None},
    **{"norm_eps": 1e-6, "attn": None, "fuse_norm": True},
}
"""What the classes of flash-linear-attention 0.6.0 take for settings that are missing; each has some of its own."""
_ONLY = {"hidden_act": "swish", "attnres_block_size": None, "norm_first": True}
_UNUSED = "attn_mode fuse_swiglu fuse_cross_entropy fuse_linear_cross_entropy use_l2warp"
_DELTA = {"allow_neg_eigval": False, "conv_size": 4}
_DECAYING = _SHARED | _DELTA | {"num_v_heads": None}
_CONVOLVED = _ONLY | {"use_short_conv": True}
_UNGROUPED = _ONLY | {"feature_map": None, "use_short_conv": False, "use_output_gate": True, "elementwise_affine": True}
_ATTENTION = Settings(
    {"layers": None, "num_heads": None, "num_kv_heads": None, "qkv_bias": False, "rope_theta": 10000.0},
    {"window_size": None},
)
"""Of `attn`, which gives some layers softmax attention."""


@dataclass(frozen=True)
class _Memory:
    """A kind of memory: its mixer, the mixer's options, and sizes of heads."""

    mixer: str
    heads: int
    key_dim: int
    value_dim: int
    options: dict[str, Any]
    weights: Callable[[Shape, _Memory, str, str], Iterator[Weight]]
    """The weights of a layer, whose names begin with the two prefixes, in the source and here."""


@reads(
    "gated_deltanet",
    of_class(
        _DECAYING | {"head_dim": 256, "num_heads": 6, "expand_v": 2.0, "num_hidden_layers": 21},
        _CONVOLVED | {"use_gate": True, "output_gate_activation": "swish"},
        _UNUSED,
    ),
)
def gated_deltanet(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Family:
    """Gated DeltaNet."""
    return _family(config, names, end_of_text, lambda shape: _decaying(config, shape, "gated-delta", _gated_delta))


@reads(
    "kda",
    of_class(
        _DECAYING | {"head_dim": 128, "num_heads": 16, "expand_v": 1.0},
        _CONVOLVED | {"safe_gate": False, "lower_bound": None},
        _UNUSED,
    ),
)
def kda(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Family:
    """Kimi delta attention."""
    family = _family(config, names, end_of_text, lambda shape: _decaying(config, shape, "kimi-delta", _kimi_delta))
    family.options["kimi-delta-gate-bias"] = True
    return family


@reads(
    "delta_net",
    of_class(
        _SHARED | _DELTA | {"num_heads": 16, "expand_k": 1.0, "expand_v": 1.0, "use_gate": False},
        _CONVOLVED | {"use_beta": True, "use_output_norm": True, "qk_norm": "l2", "qk_activation": "silu"},
        _UNUSED,
    ),
)
def delta_net(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Family:
    """DeltaNet."""
    gated = flag(config, "use_gate")

    def memory(shape: Shape) -> _Memory:
        heads, key_dim, value_dim = _expanded(config, shape)
        options = _delta_options(config, shape, "delta-net", heads, key_dim, value_dim) | {"delta-net-gate": gated}
        weights = partial(_delta_net, conv=number(config, "conv_size"), gated=gated)
        return _Memory("delta-net", heads, key_dim, value_dim, options, weights)

    return _family(config, names, end_of_text, memory)


@reads(
    "gla",
    of_class(
        _SHARED | {"num_heads": 4, "num_kv_heads": None, "expand_k": 0.5, "expand_v": 1.0},
        _UNGROUPED | {"clamp_min": None, "use_gk": True, "use_gv": False},
        f"{_UNUSED} conv_size",
    ),
)
def gla(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Family:
    """Gated linear attention."""

    def memory(shape: Shape) -> _Memory:
        heads, key_dim, value_dim = _expanded(config, shape)
        options = {"gla-key-dim": key_dim, "gla-value-dim": value_dim, "gla-eps": shape.eps}
        return _Memory("gla", heads, key_dim, value_dim, options, partial(_gla, norm=_norm_name(config)))

    return _family(config, names, end_of_text, memory)


@reads(
    "retnet",
    of_class(
        _SHARED | {"num_heads": 8, "num_kv_heads": None, "expand_k": 1.0, "expand_v": 2.0, "hidden_ratio": 2},
        _UNGROUPED,
        f"{_UNUSED} conv_size",
    ),
)
def retnet(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Family:
    """RetNet."""

    def memory(shape: Shape) -> _Memory:
        heads, key_dim, value_dim = _expanded(config, shape)
        check_heads("hidden_size", shape.width, "num_heads", heads)
        if key_dim % 2:
            raise InvalidInput(
                f"config.json: hidden_size * expand_k / num_heads is {key_dim}; it must be even: keys are rotated in "
                "pairs"
            )
        options = {"retention-value-dim": value_dim, "retention-rms-norm": True, "retention-eps": shape.eps}
        options |= {"feature-dim": key_dim, "no-attention-bias": True}
        return _Memory("retention", heads, key_dim, value_dim, options, partial(_retnet, norm=_norm_name(config)))

    return _family(config, names, end_of_text, memory)


def _family(
    config: dict[str, Any], names: set[str], end_of_text: int | None, memory: Callable[[Shape], _Memory]
) -> Family:
    """The family of models with this kind of memory, of which some layers may have attention in its place."""
    attention = mapping(config, "attn")
    attention = attention and _ATTENTION.complete(attention, config["model_type"], "config.json: in attn")
    shape = _shape(config, attention, names, end_of_text)
    made, with_attention = memory(shape), _layers_with_attention(attention, shape)
    # Until February 2025 gates and inputs of feed-forward networks were one weight.
    joined = bool(names) and not any(name.endswith(".mlp.up_proj.weight") for name in names)
    weights: list[Weight] = []
    for i in range(shape.layers):
        theirs, ours = f"{shape.prefix}layers.{i}.", f"decoder.layers.{i}."
        weights += shape.norms(theirs, ours, "attn_norm", "mlp_norm")
        weights += _joined_feed_forward(shape, theirs, ours) if joined else shape.feed_forward(theirs, ours)
        theirs, ours = f"{theirs}attn.", f"{ours}self_attn."
        if i in with_attention:
            weights += _attention(shape, flag(attention, "qkv_bias"), theirs, ours)
        else:
            weights += made.weights(shape, made, theirs, ours)
    mixers = ["softmax" if i in with_attention else made.mixer for i in range(shape.layers)]
    options = {"mixers": write_pattern(mixers) if with_attention else made.mixer, "fast-weight-heads": made.heads}
    if with_attention:
        options |= rotary_options(shape) | {"projection-bias": "qkv" if flag(attention, "qkv_bias") else "none"}
    family = shape.family(weights, options | made.options)
    del family.options["softmax-attention-layers"]
    return family


def _shape(config: dict[str, Any], attention: dict[str, Any], names: set[str], end_of_text: int | None) -> Shape:
    """The sizes, which have other names and defaults than Llama's."""
    width, between = number(config, "hidden_size"), config["intermediate_size"]
    if between is None:  # the multiple of 256 above two thirds
        ratio = 4 if config["hidden_ratio"] is None else number(config, "hidden_ratio")
        between = -(-int(width * ratio * 2 / 3) // 256) * 256
    same = {name: config[name] for name in _SAME}
    own = {"intermediate_size": between, "num_attention_heads": 1, "rms_norm_eps": positive(config, "norm_eps")}
    own["head_dim"] = None
    if attention:
        own["num_attention_heads"] = number(attention, "num_heads")
        own["num_key_value_heads"] = attention["num_kv_heads"]
        own["rope_theta"] = positive(attention, "rope_theta")
    return read_shape(SHARED | same | own, names, end_of_text, table="embeddings")


def _layers_with_attention(attention: dict[str, Any], shape: Shape) -> set[int]:
    """The numbers of the layers that have softmax attention, from 0."""
    if not attention:
        return set()
    layers = attention["layers"]
    if not isinstance(layers, list) or not all(type(i) is int and 0 <= i < shape.layers for i in layers):
        raise InvalidInput(
            f"config.json: layers of attn is {str(layers)[:200]}; it must be a list of numbers from 0 to "
            f"{shape.layers - 1}"
        )
    return set(layers)


def _attention(shape: Shape, biased: bool, theirs: str, ours: str) -> Iterator[Weight]:
    yield from shape.attention(theirs, ours)
    for part, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)) if biased else ():
        yield plain(f"{theirs}{part}_proj.bias", f"{ours}{part}_proj.bias", heads * shape.head_dim)


def _joined_feed_forward(shape: Shape, theirs: str, ours: str) -> Iterator[Weight]:
    parts = (f"{ours}fc1.gate.weight", f"{ours}fc1.linear.weight")
    yield unstacked(f"{theirs}mlp.gate_proj.weight", parts, (shape.between, shape.between), shape.width)
    yield plain(f"{theirs}mlp.down_proj.weight", f"{ours}fc2.weight", shape.width, shape.between)


def _expanded(config: dict[str, Any], shape: Shape) -> tuple[int, int, int]:
    """The number of heads, and the sizes of each head of keys and of values, which divide multiples of the width."""
    heads = number(config, "num_heads")
    if config.get("num_kv_heads") not in (None, heads):
        raise InvalidInput(f"config.json: num_kv_heads is {config['num_kv_heads']!r}; only {heads} is supported")
    keys, values = (int(shape.width * positive(config, name)) for name in ("expand_k", "expand_v"))
    for name, total in (("expand_k", keys), ("expand_v", values)):
        check_heads(f"hidden_size * {name}", total, "num_heads", heads)
    return heads, keys // heads, values // heads


def _norm_name(config: dict[str, Any]) -> str:
    """The name of the norm of what is read, which may be one module with the gate."""
    return "g_norm_swish_gate" if flag(config, "fuse_norm") else "g_norm"


def _delta_options(
    config: dict[str, Any], shape: Shape, mixer: str, key_heads: int, key_dim: int, value_dim: int
) -> dict[str, Any]:
    conv = number(config, "conv_size")
    sizes: dict[str, Any] = {"key-heads": key_heads, "key-dim": key_dim, "value-dim": value_dim, "conv": conv}
    sizes |= {"eps": shape.eps, "negative-eigenvalues": flag(config, "allow_neg_eigval")}
    return {f"{mixer}-{name}": value for name, value in sizes.items()}


def _decaying(config: dict[str, Any], shape: Shape, mixer: str, gates: Callable[..., Iterator[Weight]]) -> _Memory:
    """The memory of Gated DeltaNet and of Kimi delta attention, which differ in their gates."""
    key_heads, key_dim, conv = (number(config, name) for name in ("num_heads", "head_dim", "conv_size"))
    heads = key_heads if config["num_v_heads"] is None else number(config, "num_v_heads")
    check_heads("num_v_heads", heads, "num_heads", key_heads)
    value_dim = int(key_dim * positive(config, "expand_v"))

    def weights(shape: Shape, memory: _Memory, theirs: str, ours: str) -> Iterator[Weight]:
        yield from _delta(shape, memory, theirs, ours, key_heads=key_heads, conv=conv)
        yield from gates(theirs, ours, shape.width, heads, key_dim, value_dim)

    options = _delta_options(config, shape, mixer, key_heads, key_dim, value_dim)
    return _Memory(mixer, heads, key_dim, value_dim, options, weights)


def _delta(shape: Shape, memory: _Memory, theirs: str, ours: str, *, key_heads: int, conv: int) -> Iterator[Weight]:
    """The weights that all delta networks have."""
    keys, values = key_heads * memory.key_dim, memory.heads * memory.value_dim
    for part, rows in (("q", keys), ("k", keys), ("v", values), ("b", memory.heads)):
        yield plain(f"{theirs}{part}_proj.weight", f"{ours}{part}_proj.weight", rows, shape.width)
    convolutions = tuple(f"{theirs}{part}_conv1d.weight" for part in "qkv")
    yield stacked(convolutions, f"{ours}conv1d.weight", (keys, keys, values), 1, conv)
    yield plain(f"{theirs}o_norm.weight", f"{ours}o_norm.weight", memory.value_dim)
    yield plain(f"{theirs}o_proj.weight", f"{ours}o_proj.weight", shape.width, values)


def _delta_net(shape: Shape, memory: _Memory, theirs: str, ours: str, *, conv: int, gated: bool) -> Iterator[Weight]:
    yield from _delta(shape, memory, theirs, ours, key_heads=memory.heads, conv=conv)
    if gated:
        yield plain(f"{theirs}g_proj.weight", f"{ours}g_proj.weight", memory.heads * memory.value_dim, shape.width)


def _gated_delta(theirs: str, ours: str, width: int, heads: int, key_dim: int, value_dim: int) -> Iterator[Weight]:
    yield plain(f"{theirs}a_proj.weight", f"{ours}a_proj.weight", heads, width)
    yield plain(f"{theirs}g_proj.weight", f"{ours}g_proj.weight", heads * value_dim, width)
    for name in ("A_log", "dt_bias"):
        yield plain(f"{theirs}{name}", f"{ours}{name}", heads)


def _kimi_delta(theirs: str, ours: str, width: int, heads: int, key_dim: int, value_dim: int) -> Iterator[Weight]:
    forget = f"{ours}forget_gate."
    yield plain(f"{theirs}f_proj.0.weight", f"{forget}f_a_proj.weight", value_dim, width)
    yield plain(f"{theirs}f_proj.1.weight", f"{forget}f_b_proj.weight", heads * key_dim, value_dim)
    yield plain(f"{theirs}g_proj.0.weight", f"{ours}g_a_proj.weight", value_dim, width)
    yield plain(f"{theirs}g_proj.1.weight", f"{ours}g_b_proj.weight", heads * value_dim, value_dim)
    yield plain(f"{theirs}g_proj.1.bias", f"{ours}g_b_proj.bias", heads * value_dim)
    yield plain(f"{theirs}dt_bias", f"{forget}dt_bias", heads * key_dim)
    yield single(
        f"{theirs}A_log",
        (heads,),
        (f"{forget}A_log",),
        lambda x: (x.view(1, 1, heads, 1),),
        lambda parts: parts[0].flatten(),
    )


def _retnet(shape: Shape, memory: _Memory, theirs: str, ours: str, *, norm: str, out: str = "out") -> Iterator[Weight]:
    keys, values = memory.heads * memory.key_dim, memory.heads * memory.value_dim
    for part, rows in (("q", keys), ("k", keys), ("v", values), ("g", values)):
        yield plain(f"{theirs}{part}_proj.weight", f"{ours}{part}_proj.weight", rows, shape.width)
    yield plain(f"{theirs}{norm}.weight", f"{ours}o_norm.weight", memory.value_dim)
    yield plain(f"{theirs}o_proj.weight", f"{ours}{out}_proj.weight", shape.width, values)


def _gla(shape: Shape, memory: _Memory, theirs: str, ours: str, *, norm: str) -> Iterator[Weight]:
    yield from _retnet(shape, memory, theirs, ours, norm=norm, out="o")
    keys, rank = memory.heads * memory.key_dim, GatedLinearAttention.options["rank"].default
    yield plain(f"{theirs}gk_proj.0.weight", f"{ours}f_a_proj.weight", rank, shape.width)
    yield plain(f"{theirs}gk_proj.1.weight", f"{ours}f_b_proj.weight", keys, rank)
    yield plain(f"{theirs}gk_proj.1.bias", f"{ours}f_b_proj.bias", keys)
