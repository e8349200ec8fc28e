"""Llama, Mistral, Qwen2 and Qwen3 as models of `fast_weight_lm`: RMS norms, SwiGLU, grouped keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fairseq_fastweights.conversion.families.config_values import (
    check_heads,
    count_layers,
    flag,
    layer_kinds,
    number,
    of_class,
    positive,
    probability,
    read_end_of_text,
    rotary,
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
SHARED: dict[str, Any] = {
    **{"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None},
    **{"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_dropout": 0.0, "eos_token_id": None},
    **{"rope_parameters": None, "rope_scaling": None, "rope_theta": 10000.0, "partial_rotary_factor": None},
}
"""What Llama's descendants take for settings that are missing; most have some of their own."""
ONLY = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
_QWEN = SHARED | {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32}
_QWEN |= {"max_position_embeddings": 32768, "layer_types": None}
_LLAMA = ONLY | {"sliding_window": None, "is_llama_config": True, "rope_interleaved": False}
_FULL = {"hidden_act": "silu", "use_sliding_window": False}


@reads(
    "llama",
    of_class(
        SHARED | {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048, "head_dim": None},
        _LLAMA,
        "pretraining_tp max_sequence_length",
    ),
    served=True,
)
def llama(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Family:
    """Llama 1 to 3, and models of its shape (SmolLM, TinyLlama)."""
    return _family(config, names, end_of_text, biases="none")


@reads(
    "mistral",
    of_class(
        SHARED
        | {"vocab_size": 32000, "intermediate_size": 14336, "max_position_embeddings": 131072, "head_dim": None}
        | {"num_key_value_heads": 8, "sliding_window": 4096},
        ONLY | {"sliding_window": None},
    ),
    served=True,
)
def mistral(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Family:
    """Mistral without a sliding window."""
    return _family(config, names, end_of_text, biases="none")


@reads(
    "qwen2",
    of_class(_QWEN | {"head_dim": None}, _FULL | {"use_mrope": False}, "sliding_window max_window_layers"),
    served=True,
)
def qwen2(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Family:
    """Qwen2 and Qwen2.5: queries, keys and values have biases."""
    return _family(config, names, end_of_text, biases="qkv")


@reads(
    "qwen3",
    of_class(_QWEN | {"head_dim": 128}, ONLY | _FULL, "sliding_window max_window_layers"),
    served=True,
)
def qwen3(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Family:
    """Qwen3: queries and keys have norms."""
    return _family(config, names, end_of_text, biases="none", normed=True)


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
            "attention-dropout": probability(self.config, "attention_dropout"),
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
    kv_heads = heads if config["num_key_value_heads"] is None else number(config, "num_key_value_heads")
    check_heads("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    if config["head_dim"] is None:
        check_heads("hidden_size", width, "num_attention_heads", heads)
    return Shape(
        config=config,
        width=width,
        between=between,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width // heads if config["head_dim"] is None else number(config, "head_dim"),
        layers=layers,
        positions=positions,
        vocabulary=vocabulary,
        eps=positive(config, "rms_norm_eps"),
        tied=flag(config, "tie_word_embeddings"),
        end=read_end_of_text(config, vocabulary, end_of_text),
        # As saved by the language model; files that were saved by the model below it have no prefix.
        prefix="model." if not names or any(name.startswith("model.") for name in names) else "",
        table=table,
    )


def _family(
    config: dict[str, Any], names: set[str], end_of_text: int | None, *, biases: str, normed: bool = False
) -> Family:
    shape = read_shape(config, names, end_of_text)
    if "layer_types" in config:
        layer_kinds(config, shape.layers, ["full_attention"] * shape.layers, ["full_attention"])
    options = rotary_options(shape) | {"projection-bias": biases}
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


def rotary_options(shape: Shape, *, partial: bool = False, unused: Iterable[str] = ()) -> dict[str, Any]:
    """The options of rotary embeddings.

    Args:
        shape: of the model.
        partial: whether they may rotate a part of each head.
        unused: settings of theirs that change nothing.

    Raises:
        ValueError: for a setting that is not allowed or not supported; the message names it.
    """
    read = rotary(shape.config, shape.head_dim, scalings=SCALINGS, unused=unused)
    if read.dim != shape.head_dim and not partial:
        raise InvalidInput(
            f"config.json: partial_rotary_factor leaves {read.dim} of {shape.head_dim} dimensions a head; only 1.0 is "
            "supported"
        )
    options: dict[str, Any] = {"rotary-dim": read.dim, "rotary-base": read.base}
    if read.kind != "default":
        options["rotary-scaling"] = f"{read.kind}:{','.join(map(_digits, read.numbers))}"
        try:
            parse_scaling(options["rotary-scaling"])
        except ValueError as error:
            raise InvalidInput(f"config.json: {str(error).replace('rotary_scaling', 'rope_parameters', 1)}") from None
    return options


def _digits(value: float) -> str:
    """The shortest text of a number that is read as the same number."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
