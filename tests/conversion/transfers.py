"""Base models of a transfer: tiny Transformers of fairseq, saved as fairseq saved them in 2019 and saves them today."""

import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fairseq import tasks
from omegaconf import OmegaConf
from torch import Tensor

from tests.models.conftest import Fairseq

PRE_NORM = "--decoder-normalize-before --share-decoder-input-output-embed"

# The names of a language model's options in 2019; later ones are not among them.
_OPTIONS_2019 = """adaptive_input adaptive_input_cutoff adaptive_input_factor adaptive_softmax_cutoff
    adaptive_softmax_dropout adaptive_softmax_factor attention_dropout character_embeddings decoder_attention_heads
    decoder_embed_dim decoder_ffn_embed_dim decoder_input_dim decoder_layers decoder_learned_pos
    decoder_normalize_before decoder_output_dim dropout no_token_positional_embeddings
    share_decoder_input_output_embed tie_adaptive_proj tie_adaptive_weights data tokens_per_sample
    max_target_positions sample_break_mode""".split()


def _save(folder: Path, model: dict[str, Tensor], **others: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    history = {"criterion_name": "AdaptiveLoss", "optimizer_name": "FairseqNAG", "lr_scheduler_state": {}}
    extra = {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}}
    state = {"model": model, "optimizer_history": [{**history, "num_updates": 9}], "extra_state": extra, **others}
    torch.save(state, folder / "model.pt")
    return folder


def save_as_in_2019(model: Any, folder: Path, arch: str = "transformer_lm_wiki103") -> Path:
    """Writes model.pt as fairseq 0.6 did: a Namespace, q, k and v in one matrix, numbered norms, no versions but the
    adaptive softmax's."""
    weights: dict[str, Tensor] = {}
    state = dict(model.state_dict())
    for name, tensor in list(state.items()):
        start, _, kind = name.rpartition(".q_proj.")
        if start:
            weights[f"{start}.in_proj_{kind}"] = torch.cat([state[f"{start}.{part}_proj.{kind}"] for part in "qkv"])
        elif not re.search(r"^decoder\.version$|_float_tensor$|\.[kv]_proj\.", name):
            name = name.replace("self_attn_layer_norm", "layer_norms.0").replace("final_layer_norm", "layer_norms.2")
            weights["decoder.embed_out" if name == "decoder.output_projection.weight" else name] = tensor
    options = model.decoder.args
    known = {name: getattr(options, name) for name in _OPTIONS_2019 if hasattr(options, name)}
    known |= {"arch": arch, "task": "language_modeling", "criterion": "adaptive_loss", "optimizer": "nag"}
    known |= {"lr_scheduler": "cosine", "lr": [1.0], "min_lr": 1e-9}
    args = Namespace(**known, decoder_final_norm=not options.no_decoder_final_norm)
    extra = {"epoch": 1, "batch_offset": 0, "val_loss": 4.0}
    return _save(folder, weights, args=args, extra_state=extra, last_optimizer_state={})


def save_as_today(model: Any, folder: Path) -> Path:
    """Writes model.pt as the fairseq of today does."""
    args = model.decoder.args
    every = OmegaConf.to_container(args) if OmegaConf.is_config(args) else vars(args)
    options = {name: x for name, x in every.items() if isinstance(x, (int, float, str)) and "${" not in str(x)}
    cfg = {"model": options, "task": {"_name": "language_modeling"}}
    return _save(folder, model.state_dict(), args=None, cfg=cfg, last_optimizer_state=None, task_state={})


def make_source(fairseq: Fairseq, folder: Path, flags=PRE_NORM, arch="transformer_lm", save=save_as_today) -> Any:
    """A Transformer, saved in `folder` beside its dictionary. Norms and biases are not all ones and zeros."""
    model = fairseq.build(flags, arch=arch, seed=7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    save(model, folder)
    shutil.copy(fairseq.data() / "dict.txt", folder)
    return model


def changed(source: Path, folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """Writes a source with other weights to `folder`."""
    state = torch.load(source / "model.pt", weights_only=True)
    folder.mkdir(exist_ok=True)
    torch.save({**state, "model": change(state["model"])}, folder / "model.pt")
    shutil.copy(source / "dict.txt", folder)
    return folder


def take(fairseq: Fairseq, source: Path, flags: str, arch: str = "fast_weight_lm") -> Any:
    """The model that training starts with."""
    args = fairseq.tiny(arch, f"{flags} --transfer-from {source}")
    torch.manual_seed(3)
    return tasks.setup_task(args).build_model(args).eval()
