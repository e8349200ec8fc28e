"""Llama, Mistral, Qwen2 and Qwen3 as models of `fast_weight_lm`: RMS norms, SwiGLU, grouped keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from fairseq_fastweights.conversion.families.family import Family, Sizes, Weight, plain, read_sizes, reads, same
from fairseq_fastweights.conversion.families.settings import (
    Nullable,
    check_heads,
    layer_kinds,
    of_class,
    rotary,
)
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.rotary_embedding import parse_scaling

SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""The kinds of scaling of rotary embeddings, and their numbers in the order of `parse_scaling`."""
SHARED: dict[str, Any] = {
    **{"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": Nullable()},
    **{"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_dropout": 0.0, "eos_token_id": None},
    **{"rope_parameters": None, "rope_scaling": None, "rope_theta": 10000.0, "partial_rotary_factor": None},
}
"""The values that Llama's descendants take for missing settings; most have some of their own."""
ONLY = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
_LLAMA = SHARED | {
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "head_dim": Nullable(),
}
_MISTRAL = _LLAMA | {"intermediate_size": 14336, "max_position_embeddings": 131072, "num_key_value_heads": Nullable(8)}
_QWEN = SHARED | {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": Nullable(32)}
_QWEN |= {"max_position_embeddings": 32768, "layer_types": None}
_QWEN2, _QWEN3 = (_QWEN | {"head_dim": Nullable(size)} for size in (None, 128))
_FULL = {"hidden_act": "silu", "use_sliding_window": False}
_WINDOWS = "sliding_window max_window_layers"


@dataclass(frozen=True)
class Shape(Sizes):
    """The settings that Llama's descendants share, and the weights that all of them have.

    Attributes:
        config: the contents of config.json.
        kv_heads, head_dim: sizes of attention.
        eps: of the norms.
        prefix: of the weights' names.
        table: the name of the embeddings after it.
    """

    config: dict[str, Any]
    kv_heads: int
    head_dim: int
    eps: float
    prefix: str
    table: str

    def paths(self) -> list[tuple[str, str]]:
        """The prefixes of each layer's weights, in the folder and here."""
        return [(f"{self.prefix}layers.{i}.", f"decoder.layers.{i}.") for i in range(self.layers)]

    def norms(self, theirs: str, ours: str, before: str, between: str) -> Iterator[Weight]:
        """The two norms of a layer, by their names in the folder."""
        yield plain(f"{theirs}{before}.weight", f"{ours}self_attn_layer_norm.weight", self.width)
        yield plain(f"{theirs}{between}.weight", f"{ours}final_layer_norm.weight", self.width)

    def feed_forward(self, theirs: str, ours: str) -> Iterator[Weight]:
        """The SwiGLU network of a layer."""
        yield plain(f"{theirs}mlp.gate_proj.weight", f"{ours}fc1.gate.weight", self.between, self.width)
        yield plain(f"{theirs}mlp.up_proj.weight", f"{ours}fc1.linear.weight", self.between, self.width)
        yield plain(f"{theirs}mlp.down_proj.weight", f"{ours}fc2.weight", self.width, self.between)

    def attention(
        self, theirs: str, ours: str, projections: str = "qkv", *, biased: bool = False, normed: int = 0
    ) -> Iterator[Weight]:
        """Projections of a layer's attention, and that of its output; norms of queries and keys of size `normed`."""
        rows = {part: (self.heads if part == "q" else self.kv_heads) * self.head_dim for part in projections}
        yield from same(theirs, ours, {f"{part}_proj.weight": (n, self.width) for part, n in rows.items()})
        yield plain(f"{theirs}o_proj.weight", f"{ours}out_proj.weight", self.width, self.heads * self.head_dim)
        for part, n in rows.items():
            if biased:
                yield plain(f"{theirs}{part}_proj.bias", f"{ours}{part}_proj.bias", n)
            if normed and part != "v":
                yield plain(f"{theirs}{part}_norm.weight", f"{ours}{part}_norm.weight", normed)

    def language_model(self, layers: list[Weight], options: dict[str, Any]) -> Family:
        """The family of a model with these weights in its layers, and these options beside those that all have."""
        norm = plain(f"{self.prefix}norm.weight", "decoder.layer_norm.weight", self.width)
        common: dict[str, Any] = {
            "no-token-positional-embeddings": True,
            "dropout": 0.0,
            "attention-dropout": self.config["attention_dropout"],
            "rms-norm-eps": self.eps,
            "swiglu": True,
            "projection-bias": "none",
        }
        # fairseq's defaults are left out, so that options stay as short as those of other models.
        if self.kv_heads != self.heads:
            common["kv-heads"] = self.kv_heads
        if self.head_dim * self.heads != self.width:
            common["head-dim"] = self.head_dim
        return self.family([*layers, norm], common | options, input_name=f"{self.prefix}{self.table}.weight")


def read_shape(config: dict[str, Any], names: set[str], end_of_text: int | None, table: str = "embed_tokens") -> Shape:
    """Reads the settings of Llama's descendants; `table` is the name of the embeddings."""
    sizes = read_sizes(config, end_of_text)
    kv_heads = config["num_key_value_heads"] or sizes.heads
    check_heads("num_attention_heads", sizes.heads, "num_key_value_heads", kv_heads)
    if config["head_dim"] is None:
        check_heads("hidden_size", sizes.width, "num_attention_heads", sizes.heads)
    return Shape(
        **vars(sizes),
        config=config,
        kv_heads=kv_heads,
        head_dim=config["head_dim"] or sizes.width // sizes.heads,
        eps=config["rms_norm_eps"],
        # The prefix is that of the language model; the model without its output layer saves names without it.
        prefix="model." if not names or any(name.startswith("model.") for name in names) else "",
        table=table,
    )


def _read(
    config: dict[str, Any], names: set[str], end_of_text: int | None, *, biased: bool = False, normed: bool = False
) -> Family:
    """Llama 1 to 3 and models of its shape; Qwen2's queries, keys and values have biases, Qwen3's q and k norms."""
    shape = read_shape(config, names, end_of_text)
    if "layer_types" in config:
        layer_kinds(config, shape.layers, ["full_attention"] * shape.layers, ["full_attention"])
    weights: list[Weight] = []
    for theirs, ours in shape.paths():
        weights += shape.norms(theirs, ours, "input_layernorm", "post_attention_layernorm")
        weights += shape.feed_forward(theirs, ours)
        own = f"{theirs}self_attn.", f"{ours}self_attn."
        weights += shape.attention(*own, biased=biased, normed=shape.head_dim * normed)
    options = rotary_options(shape) | {"projection-bias": "qkv" if biased else "none"}
    return shape.language_model(weights, options | ({"query-key-norm-eps": shape.eps} if normed else {}))


_LLAMA_ONLY = ONLY | {"sliding_window": None, "is_llama_config": True, "rope_interleaved": False}
_MISTRAL_SETTINGS = of_class(_MISTRAL | {"sliding_window": Nullable(4096)}, ONLY | {"sliding_window": None})
_QWEN2_ONLY = _FULL | {"use_mrope": False}
reads("llama", of_class(_LLAMA, _LLAMA_ONLY, "pretraining_tp max_sequence_length"), served=True)(_read)
reads("mistral", _MISTRAL_SETTINGS, served=True)(_read)
reads("qwen2", of_class(_QWEN2, _QWEN2_ONLY, _WINDOWS), served=True)(partial(_read, biased=True))
reads("qwen3", of_class(_QWEN3, ONLY | _FULL, _WINDOWS), served=True)(partial(_read, normed=True))


def rotary_options(shape: Shape, *, partial: bool = False, unused: Iterable[str] = ()) -> dict[str, Any]:
    """The options of rotary embeddings.

    Args:
        shape: of the model.
        partial: whether they may rotate a part of each head.
        unused: settings of theirs that change nothing.
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
