"""Sources of a transfer: tiny Transformers of fairseq, saved as fairseq saved them in 2019 and saves them today."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

# What the options of a language model were called in 2019; later ones are not among them.
_OPTIONS_2019 = """adaptive_input adaptive_input_cutoff adaptive_input_factor adaptive_softmax_cutoff
    adaptive_softmax_dropout adaptive_softmax_factor attention_dropout character_embeddings decoder_attention_heads
    decoder_embed_dim decoder_ffn_embed_dim decoder_input_dim decoder_layers decoder_learned_pos
    decoder_normalize_before decoder_output_dim dropout no_token_positional_embeddings
    share_decoder_input_output_embed tie_adaptive_proj tie_adaptive_weights data tokens_per_sample
    max_target_positions sample_break_mode""".split()


def save_as_in_2019(model: Any, folder: Path, arch: str = "transformer_lm_wiki103") -> Path:
    """Writes model.pt as fairseq 0.6 did: a Namespace, q, k and v in one matrix, numbered norms, no versions but the
    adaptive softmax's."""
    folder.mkdir(parents=True, exist_ok=True)
    weights: dict[str, Tensor] = {}
    state = dict(model.state_dict())
    while state:
        name, tensor = next(iter(state.items()))
        if ".self_attn.q_proj." in name or ".self_attn.k_proj." in name or ".self_attn.v_proj." in name:
            start, kind = name.split("self_attn.")[0], name.rsplit(".", 1)[1]
            parts = [state.pop(f"{start}self_attn.{part}_proj.{kind}") for part in "qkv"]
            weights[f"{start}self_attn.in_proj_{kind}"] = torch.cat(parts)
            continue
        state.pop(name)
        if name == "decoder.version" or name.endswith("_float_tensor"):
            continue
        name = name.replace("self_attn_layer_norm", "layer_norms.0").replace("final_layer_norm", "layer_norms.2")
        weights["decoder.embed_out" if name == "decoder.output_projection.weight" else name] = tensor
    options = model.decoder.args
    args = Namespace(
        **{name: getattr(options, name) for name in _OPTIONS_2019 if hasattr(options, name)},
        arch=arch,
        task="language_modeling",
        criterion="adaptive_loss",
        optimizer="nag",
        lr_scheduler="cosine",
        lr=[1.0],
        min_lr=1e-9,
        decoder_final_norm=not options.no_decoder_final_norm,
    )
    last = {
        "criterion_name": "AdaptiveLoss",
        "optimizer_name": "FairseqNAG",
        "lr_scheduler_state": {},
        "num_updates": 9,
    }
    saved = {
        "args": args,
        "model": weights,
        "optimizer_history": [last],
        "extra_state": {"epoch": 1, "batch_offset": 0, "val_loss": 4.0},
        "last_optimizer_state": {},
    }
    torch.save(saved, folder / "model.pt")
    return folder


def save_as_today(model: Any, folder: Path) -> Path:
    """Writes model.pt as the fairseq of today does."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("criterion_name", "CrossEntropyCriterion"), ("optimizer_name", "FairseqAdam")
    args = model.decoder.args
    every = OmegaConf.to_container(args) if OmegaConf.is_config(args) else vars(args)
    plain = {name: value for name, value in every.items() if isinstance(value, (bool, int, float, str))}
    options = {name: value for name, value in plain.items() if "${" not in str(value)}
    saved = {
        "args": None,
        "cfg": {"model": options, "task": {"_name": "language_modeling"}},
        "model": model.state_dict(),
        "optimizer_history": [{**dict(names), "lr_scheduler_state": {}, "num_updates": 9}],
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
        "last_optimizer_state": None,
        "task_state": {},
    }
    torch.save(saved, folder / "model.pt")
    return folder
