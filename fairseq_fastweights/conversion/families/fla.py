"""Models of flash-linear-attention as models of `fast_weight_lm`, with softmax attention in the layers that have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from fairseq_fastweights.conversion.families.family import Family, Part, unstacked
from fairseq_fastweights.conversion.families.hybrid import Delta, convolutions
from fairseq_fastweights.conversion.families.llama import MLP, NORMS, SHARED, Shape, read_shape
from fairseq_fastweights.conversion.families.settings import (
    Layers,
    Nullable,
    Settings,
    checked,
    mapping,
    of_class,
    rotary_options,
)
from fairseq_fastweights.conversion.families.table import reads
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.mixer import check_divisor
from fairseq_fastweights.mixers.registry import write_pattern

_SAME = "hidden_size num_hidden_layers vocab_size tie_word_embeddings eos_token_id max_position_embeddings".split()
_SHARED: dict[str, Any] = {
    **{"hidden_size": 2048, "num_hidden_layers": Layers(24), "vocab_size": 32000, "tie_word_embeddings": False},
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
    {"layers": None, "num_heads": None, "num_kv_heads": Nullable(), "qkv_bias": False, "rope_theta": 10000.0},
    {"window_size": None},
)
"""Of `attn`, which gives some layers softmax attention."""


class _Mixer(NamedTuple):
    """A kind of linear attention."""

    name: str
    heads: int
    options: dict[str, Any]
    modules: dict[str, str] = {}
    """Those with other names in the folder, within the mixer."""
    parts: Callable[[str, str], list[Part]] = lambda theirs, ours: []
    """Weights in another form, of a mixer with these names in the folder and here."""


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
        _DECAYING | {"head_dim": 256, "num_heads": 6, "expand_v": 2.0, "num_hidden_layers": Layers(21)},
        _CONVOLVED | {"use_gate": True, "output_gate_activation": "swish"},
        _UNUSED,
    ),
)
def gated_deltanet(config: dict[str, Any], shape: Shape) -> _Mixer:
    """Gated DeltaNet."""
    return _delta("gated-delta", config, shape, _decaying(config))


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
    made = _delta("kimi-delta", config, shape, _decaying(config))
    gates = {"forget_gate": "", "forget_gate.f_a_proj": "f_proj.0", "forget_gate.f_b_proj": "f_proj.1"}
    gates |= {"g_a_proj": "g_proj.0", "g_b_proj": "g_proj.1"}

    def split(x: Tensor) -> tuple[Tensor]:
        return (x.view(1, 1, -1, 1),)  # the rates are broadcast to (batch, time, heads, key dim)

    def parts(theirs: str, ours: str) -> list[Part]:
        names = (f"{theirs}.A_log",), (f"{ours}.forget_gate.A_log",)
        return [*made.parts(theirs, ours), Part(*names, split, lambda x: (x.flatten(),))]

    return made._replace(options=made.options | {"kimi-delta-gate-bias": True}, modules=gates, parts=parts)


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
    heads, key_dim, value_dim = _expanded(config, shape)
    delta = Delta(heads, heads, key_dim, value_dim, config["conv_size"])
    return _delta("delta-net", config, shape, delta, **{"delta-net-gate": config["use_gate"]})


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
    modules = {"o_norm": _norm_name(config), "f_a_proj": "gk_proj.0", "f_b_proj": "gk_proj.1"}
    options = {"gla-key-dim": key_dim, "gla-value-dim": value_dim, "gla-eps": shape.eps}
    return _Mixer("gla", heads, options, modules)


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
    check_divisor("config.json: num_heads", heads, "hidden_size", shape.width)
    if key_dim % 2:
        raise InvalidInput(
            f"config.json: hidden_size * expand_k / num_heads is {key_dim}; it must be even: keys are rotated in pairs"
        )
    options = {"retention-value-dim": value_dim, "retention-rms-norm": True, "retention-eps": shape.eps}
    options |= {"feature-dim": key_dim, "no-attention-bias": True}
    return _Mixer("retention", heads, options, {"o_norm": _norm_name(config), "out_proj": "o_proj"})


def _read(config: dict[str, Any], names: set[str], end_of_text: int | None, *, mixer: _Reader) -> Family:
    """The family of models with this mixer, of which some layers may have softmax attention in its place."""
    attention = mapping(config, "attn")
    attention = attention and _ATTENTION.complete(attention, config["model_type"], "config.json: in attn")
    shape = read_shape(_as_llama(config, attention), names)
    made, with_attention = mixer(config, shape), _layers_with_attention(attention, shape)
    # Until February 2025 gates and inputs of feed-forward networks were one weight.
    joined = bool(names) and not any(name.endswith(".mlp.up_proj.weight") for name in names)
    common = dict(zip(NORMS, ("attn_norm", "mlp_norm"), strict=True)) | MLP | {"self_attn": "attn"}
    linear = {f"self_attn.{own}": f"attn.{name}".rstrip(".") for own, name in made.modules.items()}
    layers, parts = [], list[Part]()
    for i in range(shape.layers):
        theirs, ours = f"{shape.prefix}layers.{i}", f"decoder.layers.{i}"
        layers.append(common | ({"self_attn.out_proj": "attn.o_proj"} if i in with_attention else linear))
        parts += [] if i in with_attention else made.parts(f"{theirs}.attn", f"{ours}.self_attn")
        if joined:
            # (2 * between, width): the gate above the input.
            halves = [f"{ours}.fc1.{half}.weight" for half in ("gate", "linear")]
            parts.append(unstacked(f"{theirs}.mlp.gate_proj.weight", halves, [shape.config["intermediate_size"]] * 2))
    mixers = ["softmax" if i in with_attention else made.name for i in range(shape.layers)]
    options = {"mixers": write_pattern(mixers) if with_attention else made.name, "fast-weight-heads": made.heads}
    if with_attention:
        options |= rotary_options(shape.config, shape.head_dim)
        options["projection-bias"] = "qkv" if attention["qkv_bias"] else "none"
    return shape.language_model(end_of_text, options | made.options, layers, parts, table="embeddings")


def _as_llama(config: dict[str, Any], attention: dict[str, Any]) -> dict[str, Any]:
    """The settings under the names of Llama's, with their defaults."""
    between = config["intermediate_size"]
    if between is None:  # the multiple of 256 above two thirds
        between = -(-int(config["hidden_size"] * (config["hidden_ratio"] or 4) * 2 / 3) // 256) * 256
    # Without attention the number of heads is of no use; 1 divides every width.
    own = {name: config[name] for name in _SAME} | {"head_dim": None, "num_key_value_heads": None}
    own |= {"attention_dropout": 0.0}
    own |= {"intermediate_size": between, "num_attention_heads": 1, "rms_norm_eps": config["norm_eps"]}
    if attention:
        own["num_attention_heads"] = checked("num_heads", attention["num_heads"], 1)
        own["num_key_value_heads"] = attention["num_kv_heads"]
        own["rope_theta"] = attention["rope_theta"]
    return SHARED | own


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


def _expanded(config: dict[str, Any], shape: Shape) -> tuple[int, int, int]:
    """The number of heads, and the sizes of each head of keys and of values, which divide multiples of the width."""
    heads = config["num_heads"]
    if config.get("num_kv_heads") not in (None, heads):
        raise InvalidInput(f"config.json: num_kv_heads is {config['num_kv_heads']!r}; only {heads} is supported")
    # Rounded down, as flash-linear-attention does.
    keys, values = (int(shape.width * config[name]) for name in ("expand_k", "expand_v"))
    for name, total in (("expand_k", keys), ("expand_v", values)):
        check_divisor("config.json: num_heads", heads, f"hidden_size * {name}", total)
    return heads, keys // heads, values // heads


def _decaying(config: dict[str, Any]) -> Delta:
    """The sizes of Gated DeltaNet and of Kimi delta attention."""
    key_heads, key_dim = config["num_heads"], config["head_dim"]
    heads = config["num_v_heads"] or key_heads
    check_divisor("config.json: num_heads", key_heads, "num_v_heads", heads)
    return Delta(key_heads, heads, key_dim, int(key_dim * config["expand_v"]), config["conv_size"])


def _delta(name: str, config: dict[str, Any], shape: Shape, delta: Delta, **others: Any) -> _Mixer:
    """A mixer with a delta rule, whose weights have equal names in the folder, after these options of its own."""
    own = {f"{name}-eps": shape.eps, f"{name}-negative-eigenvalues": config["allow_neg_eigval"]}

    def parts(theirs: str, ours: str) -> list[Part]:
        return [convolutions(theirs, ours, delta.rows)]

    return _Mixer(name, delta.heads, delta.options(name) | own | others, {}, parts)


def _norm_name(config: dict[str, Any]) -> str:
    """The name of the norm of the output, which may be one module with the gate."""
    return "g_norm_swish_gate" if config["fuse_norm"] else "g_norm"
