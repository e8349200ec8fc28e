"""GPT-2 and GPT-NeoX (Pythia) as models of `fast_weight_lm`."""

from __future__ import annotations

from typing import Any

import torch

from fairseq_fastweights.conversion.families.config_values import (
    activation,
    check_heads,
    count_layers,
    flag,
    number,
    of_class,
    probability,
    read_end_of_text,
    rotary,
    sizes,
)
from fairseq_fastweights.conversion.families.family import Family, reads
from fairseq_fastweights.conversion.families.weights import embedding, fused, linear, norm, single

_PADDING = 1


@reads(
    "gpt2",
    of_class(
        {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None}
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
    width, layers, heads = number(config, "n_embd"), count_layers(config, "n_layer"), number(config, "n_head")
    between = 4 * width if config["n_inner"] is None else number(config, "n_inner")
    positions, vocabulary = number(config, "n_positions"), number(config, "vocab_size")
    check_heads("n_embd", width, "n_head", heads)
    tied = flag(config, "tie_word_embeddings")
    end = read_end_of_text(config, vocabulary, end_of_text)

    # As saved by the language model; files that were saved by the model below it have no prefix.
    prefix = "transformer." if not names or any(name.startswith("transformer.") for name in names) else ""
    weights = [
        embedding(f"{prefix}wte.weight", "decoder.embed_tokens.weight", vocabulary, width, end),
        single(
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
            *norm(f"{theirs}ln_1", f"{ours}self_attn_layer_norm", width),
            *norm(f"{theirs}ln_2", f"{ours}final_layer_norm", width),
            *fused(f"{theirs}attn.c_attn", f"{ours}self_attn", width, heads, interleaved=False),
            *linear(f"{theirs}attn.c_proj", f"{ours}self_attn.out_proj", width, width, transposed=True),
            *linear(f"{theirs}mlp.c_fc", f"{ours}fc1", width, between, transposed=True),
            *linear(f"{theirs}mlp.c_proj", f"{ours}fc2", between, width, transposed=True),
        ]
    weights += norm(f"{prefix}ln_f", "decoder.layer_norm", width)
    if not tied:
        weights.append(embedding("lm_head.weight", "decoder.output_projection.weight", vocabulary, width, end))
    return Family(
        options={
            **sizes(layers, width, heads, between, positions, tied),
            "decoder-learned-pos": True,
            "activation-fn": activation(config, "activation_function"),
            "dropout": probability(config, "resid_pdrop"),
            "attention-dropout": probability(config, "attn_pdrop"),
        },
        weights=weights,
        vocabulary=vocabulary,
        end_of_text=end,
        tied=tied,
        byte_level=True,
        output_name="lm_head.weight",
        input_name=f"{prefix}wte.weight",
    )


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
    width, between, heads = (
        number(config, name) for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    layers = count_layers(config, "num_hidden_layers")
    positions, vocabulary = number(config, "max_position_embeddings"), number(config, "vocab_size")
    check_heads("hidden_size", width, "num_attention_heads", heads)
    tied = flag(config, "tie_word_embeddings")
    end = read_end_of_text(config, vocabulary, end_of_text)
    turned = rotary(config, width // heads, base="rotary_emb_base", fraction="rotary_pct")

    output = "lm_head.weight" if "lm_head.weight" in names else "embed_out.weight"
    weights = [embedding("gpt_neox.embed_in.weight", "decoder.embed_tokens.weight", vocabulary, width, end)]
    for i in range(layers):
        theirs, ours = f"gpt_neox.layers.{i}.", f"decoder.layers.{i}."
        weights += [
            *norm(f"{theirs}input_layernorm", f"{ours}self_attn_layer_norm", width),
            *norm(f"{theirs}post_attention_layernorm", f"{ours}final_layer_norm", width),
            *fused(f"{theirs}attention.query_key_value", f"{ours}self_attn", width, heads, interleaved=True),
            *linear(f"{theirs}attention.dense", f"{ours}self_attn.out_proj", width, width),
            *linear(f"{theirs}mlp.dense_h_to_4h", f"{ours}fc1", width, between),
            *linear(f"{theirs}mlp.dense_4h_to_h", f"{ours}fc2", between, width),
        ]
    weights += norm("gpt_neox.final_layer_norm", "decoder.layer_norm", width)
    if not tied:
        weights.append(embedding(output, "decoder.output_projection.weight", vocabulary, width, end))
    return Family(
        options={
            **sizes(layers, width, heads, between, positions, tied),
            "no-token-positional-embeddings": True,
            "activation-fn": activation(config, "hidden_act"),
            "dropout": probability(config, "hidden_dropout"),
            "attention-dropout": probability(config, "attention_dropout"),
            "parallel-residual": flag(config, "use_parallel_residual"),
            "rotary-dim": turned.dim,
            "rotary-base": turned.base,
        },
        weights=weights,
        vocabulary=vocabulary,
        end_of_text=end,
        tied=tied,
        byte_level=True,
        output_name=output,
        input_name="gpt_neox.embed_in.weight",
    )
