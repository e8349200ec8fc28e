"""What of Hugging Face's GPT-2 and GPT-NeoX models is what of `fast_weight_lm` with softmax attention.

fairseq's dictionary starts with <s>, <pad>, </s>, <unk>. </s> is the source's end of text; the other word types follow
in their order, under their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from fairseq.data import Dictionary
from torch import Tensor

_EOS, _SPECIAL = 2, 4  # in fairseq's dictionary: the place of </s>, and how many places come before the words
_PADDING = 1


@dataclass(frozen=True)
class Weight:
    """One of the source's weights: its name and shape there, and the weights of ours that it holds."""

    name: str
    shape: tuple[int, ...]
    ours: tuple[str, ...]
    split: Callable[[Tensor], tuple[Tensor, ...]]
    join: Callable[[tuple[Tensor, ...]], Tensor]


@dataclass(frozen=True)
class Family:
    """How a model of one family is read.

    Args:
        options: of `fast_weight_lm`, without dashes; True for flags.
        weights: all of the source's, without buffers.
        vocabulary: how many word types there are, those included that only fill the embeddings up.
        end_of_text: number of the word type that ends a text.
        tied: whether the output layer is the embeddings.
        output_name: the output layer's name in the source.
        input_name: that of the embeddings.
    """

    options: dict[str, Any]
    weights: list[Weight]
    vocabulary: int
    end_of_text: int
    tied: bool
    output_name: str
    input_name: str

    def words(self) -> list[str]:
        """The dictionary's words after the special ones: the source's numbers but that of the end of text."""
        return [str(i) for i in range(self.vocabulary) if i != self.end_of_text]

    def dictionary(self) -> Dictionary:
        dictionary = Dictionary()
        for word in self.words():
            dictionary.add_symbol(word)
        return dictionary

    def shapes_of_ours(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of our weights, worked out without any memory for them."""
        shapes: dict[str, tuple[int, ...]] = {}
        for weight in self.weights:
            parts = weight.split(torch.empty(weight.shape, device="meta"))
            shapes |= {name: tuple(part.shape) for name, part in zip(weight.ours, parts, strict=True)}
        return shapes


def read_family(config: dict[str, Any], names: set[str], end_of_text: int | None = None) -> Family:
    """Works out how a model is read from its config.json and the names of its weights.

    Args:
        config: what config.json holds.
        names: of the weights in the folder, which tell variants of the same model apart.
        end_of_text: used where the configuration names none.

    Raises:
        ValueError: for another family, and for settings that have no counterpart, by name.
    """
    families = {"gpt2": _gpt2, "gpt_neox": _gpt_neox}
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in families:
        raise ValueError(f"config.json: model_type is {kind!r}; it must be one of {', '.join(families)}")
    return families[kind](config, names, end_of_text)


def buffers(name: str) -> bool:
    """Whether a name in the weight files is that of a buffer: a causal mask or a table, which hold nothing learnt."""
    return name.endswith((".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")) or (
        name.endswith("rotary_emb.inv_freq")
    )


def _gpt2(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Family:
    width, layers, heads = (_number(config, name) for name in ("n_embd", "n_layer", "n_head"))
    between = _number(config, "n_inner") if config.get("n_inner") is not None else 4 * width
    positions, vocabulary = _number(config, "n_positions"), _number(config, "vocab_size")
    _check_heads("n_embd", width, "n_head", heads)
    _check(config, "scale_attn_weights", True)
    _check(config, "scale_attn_by_inverse_layer_idx", False)
    _check(config, "add_cross_attention", False)
    _check(config, "layer_norm_epsilon", 1e-5)
    tied = _flag(config, "tie_word_embeddings", True)
    end = _end_of_text(config, vocabulary, end_of_text)

    # As saved by the language model; files that were saved by the model below it have no prefix.
    prefix = "transformer." if not names or any(name.startswith("transformer.") for name in names) else ""
    weights = [
        _embedding(f"{prefix}wte.weight", "decoder.embed_tokens.weight", vocabulary, width, end),
        Weight(
            f"{prefix}wpe.weight",
            (positions, width),
            ("decoder.embed_positions.weight",),
            lambda x: (torch.cat([x.new_zeros(_PADDING + 1, width), x]),),
            lambda parts: parts[0][_PADDING + 1 :],
        ),
    ]
    for i in range(layers):
        theirs, ours = f"{prefix}h.{i}.", f"decoder.layers.{i}."
        weights += [
            *_norm(f"{theirs}ln_1", f"{ours}self_attn_layer_norm", width),
            *_norm(f"{theirs}ln_2", f"{ours}final_layer_norm", width),
            *_fused(f"{theirs}attn.c_attn", f"{ours}self_attn", width, heads, interleaved=False),
            *_linear(f"{theirs}attn.c_proj", f"{ours}self_attn.out_proj", width, width, transposed=True),
            *_linear(f"{theirs}mlp.c_fc", f"{ours}fc1", width, between, transposed=True),
            *_linear(f"{theirs}mlp.c_proj", f"{ours}fc2", between, width, transposed=True),
        ]
    weights += _norm(f"{prefix}ln_f", "decoder.layer_norm", width)
    if not tied:
        weights.append(_embedding("lm_head.weight", "decoder.output_projection.weight", vocabulary, width, end))
    return Family(
        options={
            **_sizes(layers, width, heads, between, positions, tied),
            "decoder-learned-pos": True,
            "activation-fn": _activation(config, "activation_function", "gelu_new"),
            "dropout": _probability(config, "resid_pdrop", 0.1),
            "attention-dropout": _probability(config, "attn_pdrop", 0.1),
        },
        weights=weights,
        vocabulary=vocabulary,
        end_of_text=end,
        tied=tied,
        output_name="lm_head.weight",
        input_name=f"{prefix}wte.weight",
    )


def _gpt_neox(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Family:
    width, between, layers, heads = (
        _number(config, name)
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    )
    positions, vocabulary = _number(config, "max_position_embeddings"), _number(config, "vocab_size")
    _check_heads("hidden_size", width, "num_attention_heads", heads)
    _check(config, "attention_bias", True)
    _check(config, "layer_norm_eps", 1e-5)
    tied = _flag(config, "tie_word_embeddings", False)
    end = _end_of_text(config, vocabulary, end_of_text)
    fraction, base = _rotary(config)
    rotary_dim = int(width // heads * fraction)
    if rotary_dim % 2:
        raise ValueError(
            f"config.json: rotary_pct is {fraction}; of {width // heads} dimensions a head it must take an even number"
        )

    output = "lm_head.weight" if "lm_head.weight" in names else "embed_out.weight"
    weights = [_embedding("gpt_neox.embed_in.weight", "decoder.embed_tokens.weight", vocabulary, width, end)]
    for i in range(layers):
        theirs, ours = f"gpt_neox.layers.{i}.", f"decoder.layers.{i}."
        weights += [
            *_norm(f"{theirs}input_layernorm", f"{ours}self_attn_layer_norm", width),
            *_norm(f"{theirs}post_attention_layernorm", f"{ours}final_layer_norm", width),
            *_fused(f"{theirs}attention.query_key_value", f"{ours}self_attn", width, heads, interleaved=True),
            *_linear(f"{theirs}attention.dense", f"{ours}self_attn.out_proj", width, width),
            *_linear(f"{theirs}mlp.dense_h_to_4h", f"{ours}fc1", width, between),
            *_linear(f"{theirs}mlp.dense_4h_to_h", f"{ours}fc2", between, width),
        ]
    weights += _norm("gpt_neox.final_layer_norm", "decoder.layer_norm", width)
    if not tied:
        weights.append(_embedding(output, "decoder.output_projection.weight", vocabulary, width, end))
    return Family(
        options={
            **_sizes(layers, width, heads, between, positions, tied),
            "no-token-positional-embeddings": True,
            "activation-fn": _activation(config, "hidden_act", "gelu"),
            "dropout": _probability(config, "hidden_dropout", 0.0),
            "attention-dropout": _probability(config, "attention_dropout", 0.0),
            "parallel-residual": _flag(config, "use_parallel_residual", True),
            "rotary-dim": rotary_dim,
            "rotary-base": base,
        },
        weights=weights,
        vocabulary=vocabulary,
        end_of_text=end,
        tied=tied,
        output_name=output,
        input_name="gpt_neox.embed_in.weight",
    )


# ------------------------------------------------------------------------------------------- configuration


def _sizes(layers: int, width: int, heads: int, between: int, positions: int, tied: bool) -> dict[str, Any]:
    return {
        "decoder-layers": layers,
        "decoder-embed-dim": width,
        "decoder-input-dim": width,
        "decoder-output-dim": width,
        "decoder-ffn-embed-dim": between,
        "decoder-attention-heads": heads,
        "decoder-normalize-before": True,
        "no-scale-embedding": True,
        "share-decoder-input-output-embed": tied,
        "max-target-positions": positions,
        "tokens-per-sample": positions,
        "mask-special-symbols": True,
        "softmax-attention-layers": "all",
    }


def _number(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {name} is {value!r}; it must be a positive whole number")
    return value


def _flag(config: dict[str, Any], name: str, default: bool) -> bool:
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {name} is {value!r}; it must be true or false")
    return value


def _probability(config: dict[str, Any], name: str, default: float) -> float:
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ValueError(f"config.json: {name} is {value!r}; it must be at least 0 and less than 1")
    return float(value)


def _check(config: dict[str, Any], name: str, supported: Any) -> None:
    """Refuses all but the one value of a setting that there is a counterpart for, which is also its default."""
    value = config.get(name, supported)
    if value != supported:
        raise ValueError(f"config.json: {name} is {value!r}; only {supported!r} is supported")


def _check_heads(width_name: str, width: int, name: str, heads: int) -> None:
    if width % heads:
        raise ValueError(f"config.json: {name} is {heads}; it must be a divisor of {width_name}, {width}")


def _activation(config: dict[str, Any], name: str, default: str) -> str:
    tanh = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")  # three ways to write the same formula
    known = {"gelu": "gelu", "relu": "relu", **dict.fromkeys(tanh, "gelu_accurate")}
    value = config.get(name, default)
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"config.json: {name} is {value!r}; it must be one of {', '.join(known)}")
    return known[value]


def _rotary(config: dict[str, Any]) -> tuple[float, float]:
    """The fraction of each head that is turned, and the base; older and newer files write them differently."""
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default" or scaling:
        raise ValueError(
            f"config.json: rope_type is {kind!r} and rope_scaling is {scaling!r}; only 'default' and null are supported"
        )
    fraction = parameters.get("partial_rotary_factor", config.get("rotary_pct", 0.25))
    base = parameters.get("rope_theta", config.get("rotary_emb_base", 10000))
    for name, value, most in (("rotary_pct", fraction, 1), ("rotary_emb_base", base, float("inf"))):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
            raise ValueError(f"config.json: {name} is {value!r}; it must be more than 0 and at most {most}")
    return float(fraction), float(base)


def _end_of_text(config: dict[str, Any], vocabulary: int, otherwise: int | None) -> int:
    value = config.get("eos_token_id")
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is None:
        value = otherwise
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocabulary:
        raise ValueError(
            f"config.json: eos_token_id is {value!r}; it must be one number, from 0 to vocab_size - 1, {vocabulary - 1}"
        )
    return value


# ------------------------------------------------------------------------------------------- weights


def _plain(name: str, ours: str, *shape: int) -> Weight:
    return Weight(name, shape, (ours,), lambda x: (x,), lambda parts: parts[0])


def _norm(name: str, ours: str, width: int) -> Iterator[Weight]:
    for kind in ("weight", "bias"):
        yield _plain(f"{name}.{kind}", f"{ours}.{kind}", width)


def _linear(name: str, ours: str, width_in: int, width_out: int, transposed: bool = False) -> Iterator[Weight]:
    """A linear layer; GPT-2's ("Conv1D") have inputs in rows and outputs in columns."""
    if transposed:
        yield Weight(
            f"{name}.weight",
            (width_in, width_out),
            (f"{ours}.weight",),
            lambda x: (x.t(),),
            lambda parts: parts[0].t(),
        )
    else:
        yield _plain(f"{name}.weight", f"{ours}.weight", width_out, width_in)
    yield _plain(f"{name}.bias", f"{ours}.bias", width_out)


def _fused(name: str, ours: str, width: int, heads: int, interleaved: bool) -> Iterator[Weight]:
    """Queries, keys and values in one layer.

    GPT-2 has all queries, all keys, all values, side by side in columns; GPT-NeoX, in rows, the query, key and value of
    the first head, then those of the second, and so on: `interleaved`.
    """

    def separate(x: Tensor) -> tuple[Tensor, ...]:
        if not interleaved:
            return tuple(part.t() if x.dim() == 2 else part for part in x.chunk(3, dim=-1))
        return tuple(part.reshape(width, *x.shape[1:]) for part in x.view(heads, 3, -1, *x.shape[1:]).unbind(1))

    def join(parts: tuple[Tensor, ...]) -> Tensor:
        if not interleaved:
            return torch.cat([part.t() if part.dim() == 2 else part for part in parts], dim=-1)
        return torch.stack([part.reshape(heads, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 2)

    projections = ("q_proj", "k_proj", "v_proj")
    shape = (3 * width, width) if interleaved else (width, 3 * width)
    yield Weight(f"{name}.weight", shape, tuple(f"{ours}.{p}.weight" for p in projections), separate, join)
    yield Weight(f"{name}.bias", (3 * width,), tuple(f"{ours}.{p}.bias" for p in projections), separate, join)


def _embedding(name: str, ours: str, vocabulary: int, width: int, end: int) -> Weight:
    """A row for each word type; those of special symbols that the source has not are zeros, and are left out again."""

    def split(x: Tensor) -> tuple[Tensor, ...]:
        none = x.new_zeros(1, width)
        return (torch.cat([none, none, x[end : end + 1], none, x[:end], x[end + 1 :]]),)

    def join(parts: tuple[Tensor, ...]) -> Tensor:
        words = parts[0][_SPECIAL:]
        return torch.cat([words[:end], parts[0][_EOS : _EOS + 1], words[end:]])

    return Weight(name, (vocabulary, width), (ours,), split, join)
