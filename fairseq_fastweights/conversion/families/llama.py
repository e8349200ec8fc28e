"""Llama, Mistral, Qwen2 and Qwen3 as models of `fast_weight_lm`: RMS norms, SwiGLU, grouped keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fairseq_fastweights.conversion.families.config_values import (
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
from fairseq_fastweights.conversion.families.family import Family, reads
from fairseq_fastweights.conversion.families.weights import Weight, embedding, plain
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.rotary_embedding import parse_scaling

SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""The kinds of scaling of rotary embeddings, and their numbers in the order of `parse_scaling`."""


@reads("llama", served=True)
def llama(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Family:
    """Llama 1 to 3, and models of its shape (SmolLM, TinyLlama)."""
    check(config, "attention_bias", False)
    check(config, "mlp_bias", False)
    return _family(config, names, end_of_text, biases="none")


@reads("mistral", served=True)
def mistral(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Family:
    """Mistral without a sliding window."""
    check(config, "sliding_window", None)
    return _family(config, names, end_of_text, biases="none")


@reads("qwen2", served=True)
def qwen2(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Family:
    """Qwen2 and Qwen2.5: queries, keys and values have biases."""
    _check_full_attention(config)
    return _family(config, names, end_of_text, biases="qkv")


@reads("qwen3", served=True)
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
        raise InvalidInput(f"config.json: layer_types holds {other[0]!r}; only 'full_attention' is supported")


@dataclass(frozen=True)
class Shape:
    """The settings that Llama's descendants share, and the weights that all of them have.

    Attributes:
        config: the contents of config.json.
        width, between, heads, kv_heads, head_dim, layers, positions, vocabulary: sizes.
        eps: of the norms.
        tied: whether the output layer shares the weights of the embeddings.
        end: number of the word type that ends a text.
        prefix: of the weights' names.
        table: the name of the embeddings after it.
    """

    config: dict[str, Any]
    width: int
    between: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    positions: int
    vocabulary: int
    eps: float
    tied: bool
    end: int
    prefix: str
    table: str

    def norms(self, theirs: str, ours: str, before: str, between: str) -> Iterator[Weight]:
        """The two norms of a layer, by their names in the source."""
        yield plain(f"{theirs}{before}.weight", f"{ours}self_attn_layer_norm.weight", self.width)
        yield plain(f"{theirs}{between}.weight", f"{ours}final_layer_norm.weight", self.width)

    def feed_forward(self, theirs: str, ours: str) -> Iterator[Weight]:
        """The SwiGLU network of a layer."""
        yield plain(f"{theirs}mlp.gate_proj.weight", f"{ours}fc1.gate.weight", self.between, self.width)
        yield plain(f"{theirs}mlp.up_proj.weight", f"{ours}fc1.linear.weight", self.between, self.width)
        yield plain(f"{theirs}mlp.down_proj.weight", f"{ours}fc2.weight", self.width, self.between)

    def attention(self, theirs: str, ours: str, projections: str = "qkv") -> Iterator[Weight]:
        """Some of the projections of a layer's attention, and that of its output, without biases."""
        for part in projections:
            rows = (self.heads if part == "q" else self.kv_heads) * self.head_dim
            yield plain(f"{theirs}{part}_proj.weight", f"{ours}{part}_proj.weight", rows, self.width)
        yield plain(f"{theirs}o_proj.weight", f"{ours}out_proj.weight", self.width, self.heads * self.head_dim)

    def family(self, layers: list[Weight], options: dict[str, Any]) -> Family:
        """The family of a model with these weights in its layers, and these options beside those that all have."""
        table, out = f"{self.prefix}{self.table}.weight", "lm_head.weight"
        of_words = {"vocabulary": self.vocabulary, "width": self.width, "end": self.end}
        weights = [embedding(table, "decoder.embed_tokens.weight", **of_words), *layers]
        weights.append(plain(f"{self.prefix}norm.weight", "decoder.layer_norm.weight", self.width))
        if not self.tied:
            weights.append(embedding(out, "decoder.output_projection.weight", **of_words))
        own: dict[str, Any] = {
            **sizes(self.layers, self.width, self.heads, self.between, self.positions, self.tied),
            "no-token-positional-embeddings": True,
            "dropout": 0.0,
            "attention-dropout": probability(self.config, "attention_dropout", 0.0),
            "rms-norm-eps": self.eps,
            "swiglu": True,
            "projection-bias": "none",
        }
        # What is as fairseq has it is not said: checkpoints and their options stay as short as those of other models.
        if self.kv_heads != self.heads:
            own["kv-heads"] = self.kv_heads
        if self.head_dim * self.heads != self.width:
            own["head-dim"] = self.head_dim
        return Family(
            options=own | options,
            weights=weights,
            vocabulary=self.vocabulary,
            end_of_text=self.end,
            byte_level=False,
            tied=self.tied,
            output_name=out,
            input_name=table,
        )


def read_shape(config: dict[str, Any], names: set[str], end_of_text: int | None, table: str = "embed_tokens") -> Shape:
    """Reads what Llama's descendants say in the same words; `table` is the name of the embeddings.

    Raises:
        ValueError: for a setting that is missing, not allowed or not supported; the message names it.
    """
    width, between, heads = (
        number(config, name) for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    layers = count_layers(config, "num_hidden_layers")
    positions, vocabulary = number(config, "max_position_embeddings"), number(config, "vocab_size")
    kv_heads = heads if config.get("num_key_value_heads") is None else number(config, "num_key_value_heads")
    check_heads("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    if config.get("head_dim") is None:
        check_heads("hidden_size", width, "num_attention_heads", heads)
    check(config, "hidden_act", "silu")
    return Shape(
        config=config,
        width=width,
        between=between,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width // heads if config.get("head_dim") is None else number(config, "head_dim"),
        layers=layers,
        positions=positions,
        vocabulary=vocabulary,
        eps=positive(config, "rms_norm_eps", 1e-6),
        tied=flag(config, "tie_word_embeddings", False),
        end=read_end_of_text(config, vocabulary, end_of_text),
        # As saved by the language model; files that were saved by the model below it have no prefix.
        prefix="model." if not names or any(name.startswith("model.") for name in names) else "",
        table=table,
    )


def _family(
    config: dict[str, Any], names: set[str], end_of_text: int | None, *, biases: str, normed: bool = False
) -> Family:
    shape = read_shape(config, names, end_of_text)
    options = rotary_options(shape, shape.head_dim) | {"projection-bias": biases}
    weights: list[Weight] = []
    for i in range(shape.layers):
        theirs, ours = f"{shape.prefix}layers.{i}.", f"decoder.layers.{i}."
        weights += shape.norms(theirs, ours, "input_layernorm", "post_attention_layernorm")
        weights += shape.feed_forward(theirs, ours)
        weights += shape.attention(f"{theirs}self_attn.", f"{ours}self_attn.")
        for part, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
            if biases == "qkv":
                name = f"self_attn.{part}_proj.bias"
                weights.append(plain(f"{theirs}{name}", f"{ours}{name}", heads * shape.head_dim))
            if normed and part != "v":
                name = f"self_attn.{part}_norm.weight"
                weights.append(plain(f"{theirs}{name}", f"{ours}{name}", shape.head_dim))
    return shape.family(weights, options | ({"query-key-norm-eps": shape.eps} if normed else {}))


def rotary_options(shape: Shape, dim: int) -> dict[str, Any]:
    """The options of rotary embeddings of so many dimensions of a head.

    Raises:
        ValueError: for a kind of scaling that is not supported, or an odd number of dimensions.
    """
    if dim % 2:
        raise InvalidInput(f"config.json: head_dim is {dim}; it must be even: rotary embeddings rotate pairs")
    base, scaling = _rotary(shape.config, shape.positions)
    return {"rotary-dim": dim, "rotary-base": base} | ({"rotary-scaling": scaling} if scaling else {})


def _rotary(config: dict[str, Any], positions: int) -> tuple[float, str]:
    """The base, and the scaling for `parse_scaling`; older and newer files write them differently."""
    parameters = {"rope_theta": config.get("rope_theta", 10000.0)} | mapping(config, "rope_scaling")
    parameters |= mapping(config, "rope_parameters")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    base = positive(parameters, "rope_theta", 10000.0)
    if kind == "default":
        return base, ""
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise InvalidInput(f"config.json: rope_type is {kind!r}; it must be one of default, {', '.join(SCALINGS)}")
    values = (positive(parameters, name, positions if "max" in name else None) for name in SCALINGS[kind])
    scaling = f"{kind}:{','.join(map(_digits, values))}"
    try:
        parse_scaling(scaling)
    except ValueError as error:
        raise InvalidInput(f"config.json: {str(error).replace('rotary_scaling', 'rope_parameters', 1)}") from None
    return base, scaling


def _digits(value: float) -> str:
    """The shortest text of a number that is read as the same number."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
