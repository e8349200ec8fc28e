"""Llama, Mistral, Qwen2 and Qwen3 as models of `fast_weight_lm`: RMS norms, SwiGLU, grouped keys and values."""

from __future__ import annotations

from typing import Any

from fairseq_fastweights.conversion.family import Family
from fairseq_fastweights.conversion.source_config import (
    check,
    check_heads,
    count_layers,
    flag,
    mapping,
    number,
    positive,
    probability,
    read_end_of_text,
    sizes,
)
from fairseq_fastweights.conversion.source_weights import embedding, plain
from fairseq_fastweights.mixers.rotary_embedding import parse_scaling


def llama(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Family:
    """Llama 1 to 3, and models of its shape (SmolLM, TinyLlama)."""
    check(config, "attention_bias", False)
    check(config, "mlp_bias", False)
    return _family(config, names, end_of_text, biases="none")


def mistral(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Family:
    """Mistral without a sliding window."""
    check(config, "sliding_window", None)
    return _family(config, names, end_of_text, biases="none")


def qwen2(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Family:
    """Qwen2 and Qwen2.5: queries, keys and values have biases."""
    _check_full_attention(config)
    return _family(config, names, end_of_text, biases="qkv")


def qwen3(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Family:
    """Qwen3: queries and keys have norms."""
    check(config, "attention_bias", False)
    _check_full_attention(config)
    return _family({"head_dim": 128, **config}, names, end_of_text, biases="none", normed=True)


def _check_full_attention(config: dict[str, Any]) -> None:
    check(config, "use_sliding_window", False)
    kinds = config.get("layer_types") or []
    other = [kind for kind in kinds if kind != "full_attention"] if isinstance(kinds, list) else [kinds]
    if other:
        raise ValueError(f"config.json: layer_types holds {other[0]!r}; only 'full_attention' is supported")


def _family(
    config: dict[str, Any], names: set[str], end_of_text: int | None, *, biases: str, normed: bool = False
) -> Family:
    width, between, heads = (
        number(config, name) for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    layers = count_layers(config, "num_hidden_layers")
    positions, vocabulary = number(config, "max_position_embeddings"), number(config, "vocab_size")
    kv_heads = heads if config.get("num_key_value_heads") is None else number(config, "num_key_value_heads")
    check_heads("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    if config.get("head_dim") is None:
        check_heads("hidden_size", width, "num_attention_heads", heads)
    head_dim = width // heads if config.get("head_dim") is None else number(config, "head_dim")
    if head_dim % 2:
        raise ValueError(f"config.json: head_dim is {head_dim}; it must be even: rotary embeddings rotate pairs")
    check(config, "hidden_act", "silu")
    eps = positive(config, "rms_norm_eps", 1e-6)
    tied = flag(config, "tie_word_embeddings", False)
    end = read_end_of_text(config, vocabulary, end_of_text)
    base, scaling = _rotary(config, positions)

    # As saved by the language model; files that were saved by the model below it have no prefix.
    prefix = "model." if not names or any(name.startswith("model.") for name in names) else ""
    weights = [embedding(f"{prefix}embed_tokens.weight", "decoder.embed_tokens.weight", vocabulary, width, end)]
    for i in range(layers):
        theirs, ours = f"{prefix}layers.{i}.", f"decoder.layers.{i}."
        weights += [
            plain(f"{theirs}input_layernorm.weight", f"{ours}self_attn_layer_norm.weight", width),
            plain(f"{theirs}post_attention_layernorm.weight", f"{ours}final_layer_norm.weight", width),
            plain(f"{theirs}self_attn.o_proj.weight", f"{ours}self_attn.out_proj.weight", width, heads * head_dim),
            plain(f"{theirs}mlp.gate_proj.weight", f"{ours}fc1.gate.weight", between, width),
            plain(f"{theirs}mlp.up_proj.weight", f"{ours}fc1.linear.weight", between, width),
            plain(f"{theirs}mlp.down_proj.weight", f"{ours}fc2.weight", width, between),
        ]
        for part, its_heads in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            name, rows = f"self_attn.{part}_proj", its_heads * head_dim
            weights.append(plain(f"{theirs}{name}.weight", f"{ours}{name}.weight", rows, width))
            if biases == "qkv":
                weights.append(plain(f"{theirs}{name}.bias", f"{ours}{name}.bias", rows))
            if normed and part != "v":
                name = f"self_attn.{part}_norm.weight"
                weights.append(plain(f"{theirs}{name}", f"{ours}{name}", head_dim))
    weights.append(plain(f"{prefix}norm.weight", "decoder.layer_norm.weight", width))
    if not tied:
        weights.append(embedding("lm_head.weight", "decoder.output_projection.weight", vocabulary, width, end))
    options = {
        **sizes(layers, width, heads, between, positions, tied),
        "no-token-positional-embeddings": True,
        "dropout": 0.0,
        "attention-dropout": probability(config, "attention_dropout", 0.0),
        "rms-norm-eps": eps,
        "swiglu": True,
        "projection-bias": biases,
        "rotary-dim": head_dim,
        "rotary-base": base,
    }
    # What is as fairseq has it is not said: checkpoints and their options stay as short as those of other models.
    if scaling:
        options["rotary-scaling"] = scaling
    if kv_heads != heads:
        options["kv-heads"] = kv_heads
    if head_dim * heads != width:
        options["head-dim"] = head_dim
    if normed:
        options["query-key-norm-eps"] = eps
    return Family(
        options=options,
        weights=weights,
        vocabulary=vocabulary,
        end_of_text=end,
        byte_level=False,
        tied=tied,
        output_name="lm_head.weight",
        input_name=f"{prefix}embed_tokens.weight",
    )


def _rotary(config: dict[str, Any], positions: int) -> tuple[float, str]:
    """The base, and the scaling for `parse_scaling`; older and newer files write them differently."""
    parameters = {"rope_theta": config.get("rope_theta", 10000.0)} | mapping(config, "rope_scaling")
    parameters |= mapping(config, "rope_parameters")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    base = positive(parameters, "rope_theta", 10000.0)
    if kind == "default":
        return base, ""
    needed = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    if kind not in needed:
        raise ValueError(f"config.json: rope_type is {kind!r}; it must be one of default, {', '.join(needed)}")
    values = (positive(parameters, name, positions if "max" in name else None) for name in needed[kind])
    scaling = f"{kind}:{','.join(map(_digits, values))}"
    try:
        parse_scaling(scaling)
    except ValueError as error:
        raise ValueError(f"config.json: {str(error).replace('rotary_scaling', 'rope_parameters', 1)}") from None
    return base, scaling


def _digits(value: float) -> str:
    """The shortest text of a number that is read as the same number."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
