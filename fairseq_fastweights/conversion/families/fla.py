"""Models of flash-linear-attention as models of `fast_weight_lm`: Gated DeltaNet and Kimi delta attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fairseq_fastweights.conversion.families.config_values import check, check_heads, flag, number, positive
from fairseq_fastweights.conversion.families.family import Family, reads
from fairseq_fastweights.conversion.families.llama import Shape, read_shape
from fairseq_fastweights.conversion.families.weights import Weight, plain, single, stacked

_SAME = ("hidden_size", "num_hidden_layers", "vocab_size", "tie_word_embeddings", "eos_token_id")


@reads("gated_deltanet")
def gated_deltanet(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Family:
    """Gated DeltaNet in all layers."""
    check(config, "use_gate", True)
    return _family(config, names, end_of_text, "gated-delta", _gated_delta, head_dim=256, heads=6, expand=2.0)


@reads("kda")
def kda(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Family:
    """Kimi delta attention in all layers."""
    check(config, "safe_gate", False)
    check(config, "lower_bound", None)
    family = _family(config, names, end_of_text, "kimi-delta", _kimi_delta, head_dim=128, heads=16, expand=1.0)
    family.options["kimi-delta-gate-bias"] = True
    return family


def _family(
    config: dict[str, Any],
    names: set[str],
    end_of_text: int | None,
    mixer: str,
    gates: Callable[..., Iterator[Weight]],
    *,
    head_dim: int,
    heads: int,
    expand: float,
) -> Family:
    """A family; `head_dim`, `heads` and `expand` are the defaults of its settings."""
    config = {"head_dim": head_dim, "num_heads": heads, "expand_v": expand, "hidden_ratio": 4, "conv_size": 4, **config}
    supported = {"use_short_conv": True, "hidden_act": "swish", "attn": None, "attnres_block_size": None}
    for name, value in supported.items():
        check(config, name, value)
    shape = _shape(config, names, end_of_text)
    key_heads, key_dim, conv = (number(config, name) for name in ("num_heads", "head_dim", "conv_size"))
    value_heads = key_heads if config.get("num_v_heads") is None else number(config, "num_v_heads")
    check_heads("num_v_heads", value_heads, "num_heads", key_heads)
    value_dim = int(key_dim * positive(config, "expand_v", None))
    keys, values = key_heads * key_dim, value_heads * value_dim
    weights: list[Weight] = []
    for i in range(shape.layers):
        theirs, ours = f"{shape.prefix}layers.{i}.", f"decoder.layers.{i}."
        weights += shape.norms(theirs, ours, "attn_norm", "mlp_norm")
        weights += shape.feed_forward(theirs, ours)
        theirs, ours = f"{theirs}attn.", f"{ours}self_attn."
        for part, rows in (("q", keys), ("k", keys), ("v", values), ("b", value_heads)):
            weights.append(plain(f"{theirs}{part}_proj.weight", f"{ours}{part}_proj.weight", rows, shape.width))
        convolutions = tuple(f"{theirs}{part}_conv1d.weight" for part in "qkv")
        weights.append(stacked(convolutions, f"{ours}conv1d.weight", (keys, keys, values), 1, conv))
        weights.append(plain(f"{theirs}o_norm.weight", f"{ours}o_norm.weight", value_dim))
        weights.append(plain(f"{theirs}o_proj.weight", f"{ours}o_proj.weight", shape.width, values))
        weights += gates(theirs, ours, shape.width, value_heads, key_dim, value_dim)
    sizes = {"key-heads": key_heads, "key-dim": key_dim, "value-dim": value_dim, "conv": conv, "eps": shape.eps}
    sizes["negative-eigenvalues"] = flag(config, "allow_neg_eigval", False)
    options = {"mixers": mixer, "fast-weight-heads": value_heads}
    family = shape.family(weights, options | {f"{mixer}-{name}": value for name, value in sizes.items()})
    del family.options["softmax-attention-layers"]
    return family


def _shape(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Shape:
    """The sizes, which have other names and defaults than Llama's."""
    width, between = number(config, "hidden_size"), config.get("intermediate_size")
    if between is None:  # the multiple of 256 above two thirds
        between = -(-int(width * number(config, "hidden_ratio") * 2 / 3) // 256) * 256
    same = {name: config[name] for name in _SAME if name in config}
    own = {"intermediate_size": between, "num_attention_heads": 1, "rms_norm_eps": positive(config, "norm_eps", 1e-6)}
    own["max_position_embeddings"] = config.get("max_position_embeddings", 2048)
    return read_shape(same | own, names, end_of_text, table="embeddings")


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
