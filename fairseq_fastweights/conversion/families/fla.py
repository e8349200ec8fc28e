"""Models of flash-linear-attention as models of `fast_weight_lm`, with softmax attention in the layers that have it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from fairseq_fastweights.conversion.families.family import Family, Weight, plain, reads, same, single, unstacked
from fairseq_fastweights.conversion.families.hybrid import Delta
from fairseq_fastweights.conversion.families.llama import SHARED, Shape, read_shape, rotary_options
from fairseq_fastweights.conversion.families.settings import (
    Nullable,
    Settings,
    check_heads,
    mapping,
    number,
    of_class,
    positive,
)
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.gated_linear_attention import GatedLinearAttention
from fairseq_fastweights.mixers.registry import write_pattern

_SAME = "hidden_size num_hidden_layers vocab_size tie_word_embeddings eos_token_id max_position_embeddings".split()
_SHARED: dict[str, Any] = {
    **{"hidden_size": 2048, "num_hidden_layers": 24, "vocab_size": 32000, "tie_word_embeddings": False},
    **{
        "eos_token_id": None,
        "max_position_embeddings": 2048,
        "hidden_ratio": Nullable(4),
        "intermediate_size": Nullable(),
    },
    **{"norm_eps": 1e-6, "attn": None, "fuse_norm": True},
}
"""The values that the classes of flash-linear-attention 0.6.0 take for missing settings; each has some of its own."""
_ONLY = {"hidden_act": "swish", "attnres_block_size": None, "norm_first": True}
_UNUSED = "attn_mode fuse_swiglu fuse_cross_entropy fuse_linear_cross_entropy use_l2warp"
_DELTA = {"allow_neg_eigval": False, "conv_size": 4}
_DECAYING = _SHARED | _DELTA | {"num_v_heads": Nullable()}
_CONVOLVED = _ONLY | {"use_short_conv": True}
_UNGROUPED = _ONLY | {"feature_map": None, "use_short_conv": False, "use_output_gate": True, "elementwise_affine": True}
_ATTENTION = Settings(
    {"layers": None, "num_heads": None, "num_kv_heads": None, "qkv_bias": False, "rope_theta": 10000.0},
    {"window_size": None},
)
"""Of `attn`, which gives some layers softmax attention."""


class _Mixer(NamedTuple):
    """A kind of linear attention."""

    name: str
    heads: int
    options: dict[str, Any]
    weights: Callable[[str, str], Iterable[Weight]]
    """The weights of a layer, whose names begin with the two prefixes, in the folder and here."""


_Reader = Callable[[dict[str, Any], Shape], _Mixer]


def _reads(model_type: str, settings: Settings) -> Callable[[_Reader], _Reader]:
    """Enters models with this mixer, which is made of the settings and the model's shape."""

    def enter(mixer: _Reader) -> _Reader:
        reads(model_type, settings)(lambda *given: _read(*given, mixer=mixer))
        return mixer

    return enter


@_reads(
    "gated_deltanet",
    of_class(
        _DECAYING | {"head_dim": 256, "num_heads": 6, "expand_v": 2.0, "num_hidden_layers": 21},
        _CONVOLVED | {"use_gate": True, "output_gate_activation": "swish"},
        _UNUSED,
    ),
)
def gated_deltanet(config: dict[str, Any], shape: Shape) -> _Mixer:
    """Gated DeltaNet."""
    delta = _decaying(config)

    def weights(theirs: str, ours: str) -> Iterator[Weight]:
        yield from delta.weights(shape.width, theirs, ours, "qkvbag")
        yield from delta.decay_weights(theirs, ours)

    return _Mixer("gated-delta", delta.heads, _delta_options(config, shape, "gated-delta", delta), weights)


@_reads(
    "kda",
    of_class(
        _DECAYING | {"head_dim": 128, "num_heads": 16, "expand_v": 1.0},
        _CONVOLVED | {"safe_gate": False, "lower_bound": None},
        _UNUSED,
    ),
)
def kda(config: dict[str, Any], shape: Shape) -> _Mixer:
    """Kimi delta attention."""
    delta = _decaying(config)
    heads, value_dim, width = delta.heads, delta.value_dim, shape.width
    keys, values = heads * delta.key_dim, heads * value_dim

    def weights(theirs: str, ours: str) -> Iterator[Weight]:
        forget = f"{ours}forget_gate."
        yield from delta.weights(width, theirs, ours, "qkvb")
        for part, own, outputs in (("f", f"{forget}f", keys), ("g", f"{ours}g", values)):
            yield plain(f"{theirs}{part}_proj.0.weight", f"{own}_a_proj.weight", value_dim, width)
            yield plain(f"{theirs}{part}_proj.1.weight", f"{own}_b_proj.weight", outputs, value_dim)
        yield plain(f"{theirs}g_proj.1.bias", f"{ours}g_b_proj.bias", values)
        yield plain(f"{theirs}dt_bias", f"{forget}dt_bias", keys)
        # Here the rates are broadcast to (batch, time, heads, key dim).
        rates = (f"{forget}A_log",)
        yield single(f"{theirs}A_log", (heads,), rates, lambda x: (x.view(1, 1, heads, 1),), lambda x: x[0].flatten())

    options = _delta_options(config, shape, "kimi-delta", delta) | {"kimi-delta-gate-bias": True}
    return _Mixer("kimi-delta", heads, options, weights)


@_reads(
    "delta_net",
    of_class(
        _SHARED | _DELTA | {"num_heads": 16, "expand_k": 1.0, "expand_v": 1.0, "use_gate": False},
        _CONVOLVED | {"use_beta": True, "use_output_norm": True, "qk_norm": "l2", "qk_activation": "silu"},
        _UNUSED,
    ),
)
def delta_net(config: dict[str, Any], shape: Shape) -> _Mixer:
    """DeltaNet."""
    gated = config["use_gate"]
    heads, key_dim, value_dim = _expanded(config, shape)
    delta = Delta(heads, heads, key_dim, value_dim, config["conv_size"])
    options = _delta_options(config, shape, "delta-net", delta) | {"delta-net-gate": gated}
    return _Mixer("delta-net", heads, options, partial(delta.weights, shape.width, parts="qkvbg" if gated else "qkvb"))


@_reads(
    "gla",
    of_class(
        _SHARED | {"num_heads": 4, "num_kv_heads": None, "expand_k": 0.5, "expand_v": 1.0},
        _UNGROUPED | {"clamp_min": None, "use_gk": True, "use_gv": False},
        f"{_UNUSED} conv_size",
    ),
)
def gla(config: dict[str, Any], shape: Shape) -> _Mixer:
    """Gated linear attention."""
    heads, key_dim, value_dim = _expanded(config, shape)
    rank, norm = GatedLinearAttention.options["rank"].default, _norm_name(config)

    def weights(theirs: str, ours: str) -> Iterator[Weight]:
        yield from _gated_weights(shape.width, heads, key_dim, value_dim, theirs, ours, norm, "o")
        yield plain(f"{theirs}gk_proj.0.weight", f"{ours}f_a_proj.weight", rank, shape.width)
        yield plain(f"{theirs}gk_proj.1.weight", f"{ours}f_b_proj.weight", heads * key_dim, rank)
        yield plain(f"{theirs}gk_proj.1.bias", f"{ours}f_b_proj.bias", heads * key_dim)

    return _Mixer("gla", heads, {"gla-key-dim": key_dim, "gla-value-dim": value_dim, "gla-eps": shape.eps}, weights)


@_reads(
    "retnet",
    of_class(
        _SHARED | {"num_heads": 8, "num_kv_heads": None, "expand_k": 1.0, "expand_v": 2.0, "hidden_ratio": Nullable(2)},
        _UNGROUPED,
        f"{_UNUSED} conv_size",
    ),
)
def retnet(config: dict[str, Any], shape: Shape) -> _Mixer:
    """RetNet."""
    heads, key_dim, value_dim = _expanded(config, shape)
    check_heads("hidden_size", shape.width, "num_heads", heads)
    if key_dim % 2:
        raise InvalidInput(
            f"config.json: hidden_size * expand_k / num_heads is {key_dim}; it must be even: keys are rotated in pairs"
        )
    options = {"retention-value-dim": value_dim, "retention-rms-norm": True, "retention-eps": shape.eps}
    options |= {"feature-dim": key_dim, "no-attention-bias": True}
    weights = partial(_gated_weights, shape.width, heads, key_dim, value_dim, norm=_norm_name(config), out="out")
    return _Mixer("retention", heads, options, weights)


def _read(config: dict[str, Any], names: set[str], end_of_text: int | None, *, mixer: _Reader) -> Family:
    """The family of models with this mixer, of which some layers may have softmax attention in its place."""
    attention = mapping(config, "attn")
    attention = attention and _ATTENTION.complete(attention, config["model_type"], "config.json: in attn")
    shape = _shape(config, attention, names, end_of_text)
    made, with_attention = mixer(config, shape), _layers_with_attention(attention, shape)
    biased = bool(attention) and attention["qkv_bias"]
    # Until February 2025 gates and inputs of feed-forward networks were one weight.
    joined = bool(names) and not any(name.endswith(".mlp.up_proj.weight") for name in names)
    weights: list[Weight] = []
    for i, (theirs, ours) in enumerate(shape.paths()):
        weights += shape.norms(theirs, ours, "attn_norm", "mlp_norm")
        weights += _joined_feed_forward(shape, theirs, ours) if joined else shape.feed_forward(theirs, ours)
        theirs, ours = f"{theirs}attn.", f"{ours}self_attn."
        weights += shape.attention(theirs, ours, biased=biased) if i in with_attention else made.weights(theirs, ours)
    mixers = ["softmax" if i in with_attention else made.name for i in range(shape.layers)]
    options = {"mixers": write_pattern(mixers) if with_attention else made.name, "fast-weight-heads": made.heads}
    if with_attention:
        options |= rotary_options(shape) | {"projection-bias": "qkv" if biased else "none"}
    return shape.language_model(weights, options | made.options)


def _shape(config: dict[str, Any], attention: dict[str, Any], names: set[str], end_of_text: int | None) -> Shape:
    """The sizes, which have other names and defaults than Llama's."""
    between = config["intermediate_size"]
    if between is None:  # the multiple of 256 above two thirds
        between = -(-int(config["hidden_size"] * (config["hidden_ratio"] or 4) * 2 / 3) // 256) * 256
    # Without attention the number of heads is of no use; 1 divides every width.
    own = {name: config[name] for name in _SAME} | {"head_dim": None, "num_key_value_heads": None}
    own |= {"intermediate_size": between, "num_attention_heads": 1, "rms_norm_eps": config["norm_eps"]}
    if attention:
        own["num_attention_heads"] = number(attention, "num_heads")
        own["num_key_value_heads"] = attention["num_kv_heads"]
        own["rope_theta"] = positive(attention, "rope_theta")
    return read_shape(SHARED | own, names, end_of_text, table="embeddings")


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


def _joined_feed_forward(shape: Shape, theirs: str, ours: str) -> Iterator[Weight]:
    parts = (f"{ours}fc1.gate.weight", f"{ours}fc1.linear.weight")
    yield unstacked(f"{theirs}mlp.gate_proj.weight", parts, (shape.between, shape.between), shape.width)
    yield plain(f"{theirs}mlp.down_proj.weight", f"{ours}fc2.weight", shape.width, shape.between)


def _expanded(config: dict[str, Any], shape: Shape) -> tuple[int, int, int]:
    """The number of heads, and the sizes of each head of keys and of values, which divide multiples of the width."""
    heads = config["num_heads"]
    if config.get("num_kv_heads") not in (None, heads):
        raise InvalidInput(f"config.json: num_kv_heads is {config['num_kv_heads']!r}; only {heads} is supported")
    keys, values = (int(shape.width * config[name]) for name in ("expand_k", "expand_v"))
    for name, total in (("expand_k", keys), ("expand_v", values)):
        check_heads(f"hidden_size * {name}", total, "num_heads", heads)
    return heads, keys // heads, values // heads


def _decaying(config: dict[str, Any]) -> Delta:
    """The sizes of Gated DeltaNet and of Kimi delta attention."""
    key_heads, key_dim = config["num_heads"], config["head_dim"]
    heads = config["num_v_heads"] or key_heads
    check_heads("num_v_heads", heads, "num_heads", key_heads)
    return Delta(key_heads, heads, key_dim, int(key_dim * config["expand_v"]), config["conv_size"])


def _delta_options(config: dict[str, Any], shape: Shape, mixer: str, delta: Delta) -> dict[str, Any]:
    own = {f"{mixer}-eps": shape.eps, f"{mixer}-negative-eigenvalues": config["allow_neg_eigval"]}
    return delta.options(mixer) | own


def _norm_name(config: dict[str, Any]) -> str:
    """The name of the norm of the output, which may be one module with the gate."""
    return "g_norm_swish_gate" if config["fuse_norm"] else "g_norm"


def _gated_weights(
    width: int, heads: int, key_dim: int, value_dim: int, theirs: str, ours: str, norm: str, out: str
) -> Iterator[Weight]:
    """The weights that RetNet and gated linear attention share."""
    keys, values = heads * key_dim, heads * value_dim
    yield from same(theirs, ours, {f"{part}_proj.weight": (keys, width) for part in "qk"})
    yield from same(theirs, ours, {f"{part}_proj.weight": (values, width) for part in "vg"})
    yield plain(f"{theirs}{norm}.weight", f"{ours}o_norm.weight", value_dim)
    yield plain(f"{theirs}o_proj.weight", f"{ours}{out}_proj.weight", width, values)
