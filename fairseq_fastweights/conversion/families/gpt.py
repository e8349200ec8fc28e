"""GPT-2 and GPT-NeoX (Pythia) as models of `fast_weight_lm`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fairseq_fastweights.conversion.families.family import Family, Weight, plain, read_sizes, reads, same, single
from fairseq_fastweights.conversion.families.settings import Nullable, activation, check_heads, of_class, rotary

_PADDING = 1


@reads(
    "gpt2",
    of_class(
        {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": Nullable()}
        | {"activation_function": "gelu_new", "resid_pdrop": 0.1, "attn_pdrop": 0.1, "tie_word_embeddings": True}
        | {"eos_token_id": None},
        {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "layer_norm_epsilon": 1e-5},
        "n_ctx predict_special_tokens embd_pdrop reorder_and_upcast_attn summary_type summary_use_proj "
        "summary_activation summary_proj_to_labels summary_first_dropout",
        hidden_size="n_embd",
        max_position_embeddings="n_positions",
        num_attention_heads="n_head",
        num_hidden_layers="n_layer",
    ),
)
def gpt2(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Family:
    """GPT-2: learned positions, one matrix for queries, keys and values."""
    if config["n_inner"] is None:
        config["n_inner"] = 4 * config["n_embd"]
    names_of_sizes = {"width": "n_embd", "between": "n_inner", "heads": "n_head", "layers": "n_layer"}
    sizes = read_sizes(config, end_of_text, positions="n_positions", **names_of_sizes)
    width, between = sizes.width, sizes.between
    check_heads("n_embd", width, "n_head", sizes.heads)
    # Weights that the language model saved have this prefix; those that the model without its output layer saved, none.
    prefix = "transformer." if not names or any(name.startswith("transformer.") for name in names) else ""
    # fairseq numbers positions from 2, after the id of padding: two rows of zeros come first.
    weights = [
        single(
            f"{prefix}wpe.weight",
            (sizes.positions, width),
            ("decoder.embed_positions.weight",),
            lambda x: (torch.cat([x.new_zeros(_PADDING + 1, width), x]),),
            lambda parts: parts[0][_PADDING + 1 :],
        ),
    ]
    for i in range(sizes.layers):
        theirs, ours = f"{prefix}h.{i}.", f"decoder.layers.{i}."
        weights += [
            *_norm(f"{theirs}ln_1", f"{ours}self_attn_layer_norm", width),
            *_norm(f"{theirs}ln_2", f"{ours}final_layer_norm", width),
            *_fused(f"{theirs}attn.c_attn", f"{ours}self_attn", width, sizes.heads, interleaved=False),
            *_linear(f"{theirs}attn.c_proj", f"{ours}self_attn.out_proj", width, width, transposed=True),
            *_linear(f"{theirs}mlp.c_fc", f"{ours}fc1", width, between, transposed=True),
            *_linear(f"{theirs}mlp.c_proj", f"{ours}fc2", between, width, transposed=True),
        ]
    weights += _norm(f"{prefix}ln_f", "decoder.layer_norm", width)
    options = {
        "decoder-learned-pos": True,
        "activation-fn": activation(config, "activation_function"),
        "dropout": config["resid_pdrop"],
        "attention-dropout": config["attn_pdrop"],
    }
    return sizes.family(weights, options, input_name=f"{prefix}wte.weight", byte_level=True)


@reads(
    "gpt_neox",
    of_class(
        {"vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64}
        | {"intermediate_size": 24576, "hidden_act": "gelu", "attention_dropout": 0.0, "hidden_dropout": 0.0}
        | {"max_position_embeddings": 2048, "tie_word_embeddings": False, "use_parallel_residual": True}
        | {"rope_parameters": None, "rope_scaling": None, "rotary_emb_base": 10000.0, "rotary_pct": 0.25}
        | {"eos_token_id": None},
        {"attention_bias": True, "layer_norm_eps": 1e-5},
        "classifier_dropout",
    ),
)
def gpt_neox(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Family:
    """GPT-NeoX: rotary positions in a part of each head, attention and feed-forward network in parallel."""
    sizes = read_sizes(config, end_of_text)
    width, between = sizes.width, sizes.between
    check_heads("hidden_size", width, "num_attention_heads", sizes.heads)
    rotated = rotary(config, width // sizes.heads, base="rotary_emb_base", fraction="rotary_pct")
    weights: list[Weight] = []
    for i in range(sizes.layers):
        theirs, ours = f"gpt_neox.layers.{i}.", f"decoder.layers.{i}."
        weights += [
            *_norm(f"{theirs}input_layernorm", f"{ours}self_attn_layer_norm", width),
            *_norm(f"{theirs}post_attention_layernorm", f"{ours}final_layer_norm", width),
            *_fused(f"{theirs}attention.query_key_value", f"{ours}self_attn", width, sizes.heads, interleaved=True),
            *_linear(f"{theirs}attention.dense", f"{ours}self_attn.out_proj", width, width),
            *_linear(f"{theirs}mlp.dense_h_to_4h", f"{ours}fc1", width, between),
            *_linear(f"{theirs}mlp.dense_4h_to_h", f"{ours}fc2", between, width),
        ]
    weights += _norm("gpt_neox.final_layer_norm", "decoder.layer_norm", width)
    options = {
        "no-token-positional-embeddings": True,
        "activation-fn": activation(config, "hidden_act"),
        "dropout": config["hidden_dropout"],
        "attention-dropout": config["attention_dropout"],
        "parallel-residual": config["use_parallel_residual"],
        "rotary-dim": rotated.dim,
        "rotary-base": rotated.base,
    }
    output = "lm_head.weight" if "lm_head.weight" in names else "embed_out.weight"
    return sizes.family(weights, options, input_name="gpt_neox.embed_in.weight", output_name=output, byte_level=True)


def _norm(name: str, ours: str, width: int) -> Iterator[Weight]:
    return same(name, ours, {".weight": (width,), ".bias": (width,)})


def _linear(name: str, ours: str, width_in: int, width_out: int, transposed: bool = False) -> Iterator[Weight]:
    """A linear layer; GPT-2's ("Conv1D") have inputs in rows and outputs in columns."""
    if transposed:
        shape, own = (width_in, width_out), (f"{ours}.weight",)
        yield single(f"{name}.weight", shape, own, lambda x: (x.t(),), lambda parts: parts[0].t())
    else:
        yield plain(f"{name}.weight", f"{ours}.weight", width_out, width_in)
    yield plain(f"{name}.bias", f"{ours}.bias", width_out)


def _fused(name: str, ours: str, width: int, heads: int, interleaved: bool) -> Iterator[Weight]:
    """Queries, keys and values in one layer.

    GPT-2 has all queries, all keys, all values, side by side in columns; GPT-NeoX, in rows, the query, key and value of
    the first head, then those of the second, and so on: `interleaved`.
    """

    def split(x: Tensor) -> tuple[Tensor, ...]:
        # (width, 3 width), as inputs are in rows; biases (3 width,)
        if not interleaved:
            return tuple(part.t() if x.dim() == 2 else part for part in x.chunk(3, dim=-1))
        # (3 width, width) -> (heads, 3, head dim, width)
        return tuple(part.reshape(width, *x.shape[1:]) for part in x.view(heads, 3, -1, *x.shape[1:]).unbind(1))

    def join(parts: tuple[Tensor, ...]) -> Tensor:
        if not interleaved:
            return torch.cat([part.t() if part.dim() == 2 else part for part in parts], dim=-1)
        return torch.stack([part.reshape(heads, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 2)

    for kind in ("weight", "bias"):
        own = tuple(f"{ours}.{part}_proj.{kind}" for part in "qkv")
        shape = (3 * width,) if kind == "bias" else (3 * width, width) if interleaved else (width, 3 * width)
        yield single(f"{name}.{kind}", shape, own, split, join)
