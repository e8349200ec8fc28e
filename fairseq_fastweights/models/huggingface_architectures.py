"""Named architectures with the shapes of GPT-2 and Pythia.

With --softmax-attention-layers all they are these models; otherwise their attention is replaced by fast weights. The
RetNet and the StripedMamba of Choi 2024 (Table 1) are Pythia with retention, in heads of 256, and with Mamba in place
of attention.
"""

from __future__ import annotations

from typing import Any

from fairseq.models.transformer_lm import TransformerLanguageModelConfig, base_lm_architecture
from fairseq.utils import safe_getattr

from fairseq_fastweights.models.fast_weight_lm import FastWeightLanguageModelConfig
from fairseq_fastweights.models.fast_weight_options import set_defaults
from fairseq_fastweights.models.option_checks import register_architecture

# Layers, width, heads.
GPT2 = {"small": (12, 768, 12), "medium": (24, 1024, 16), "large": (36, 1280, 20), "xl": (48, 1600, 25)}
PYTHIA = {"70m": (6, 512, 8), "160m": (12, 768, 12), "410m": (24, 1024, 16), "1b": (16, 2048, 8)}
# The Pythia that it is but for retention, and heads of that.
RETNET = {"430m": ("410m", 4), "1b": ("1b", 8)}


def _register(name: str, document: str, sizes: tuple[int, int, int], **settings: Any) -> None:
    layers, width, heads = sizes
    defaults = {
        "decoder_layers": layers,
        "decoder_embed_dim": width,
        "decoder_ffn_embed_dim": 4 * width,
        "decoder_attention_heads": heads,
        "mask_special_symbols": True,
        "init_std": 0.02,
        **settings,
    }

    def architecture(args: Any) -> None:
        for option, value in defaults.items():
            if safe_getattr(args, option, None) is None:  # max_target_positions is there, of the task, as None
                setattr(args, option, value)
        set_defaults(args, FastWeightLanguageModelConfig, TransformerLanguageModelConfig)
        base_lm_architecture(args)

    architecture.__doc__ = document
    register_architecture("fast_weight_lm", name)(architecture)


for _size, _sizes in GPT2.items():
    _register(
        f"fast_weight_lm_gpt2_{_size}",
        f"Radford et al. 2019, GPT-2 {_size}.",
        _sizes,
        decoder_learned_pos=True,
        no_scale_embedding=True,
        share_decoder_input_output_embed=True,
        activation_fn="gelu_accurate",
        max_target_positions=1024,
        dropout=0.1,
        attention_dropout=0.1,
    )


def _register_pythia(name: str, document: str, sizes: tuple[int, int, int], **settings: Any) -> None:
    _register(
        name,
        document,
        sizes,
        no_token_positional_embeddings=True,
        no_scale_embedding=True,
        rotary_dim=sizes[1] // sizes[2] // 4,
        parallel_residual=True,
        activation_fn="gelu",
        max_target_positions=2048,
        dropout=0.0,
        attention_dropout=0.0,
        **settings,
    )


for _size, _sizes in PYTHIA.items():
    _register_pythia(
        f"fast_weight_lm_pythia_{_size}",
        f"Biderman et al. 2023, Pythia {_size}: rotary embedding of a quarter of each head, parallel residual.",
        _sizes,
    )

for _size, (_pythia, _heads) in RETNET.items():
    _register_pythia(
        f"fast_weight_lm_retnet_{_size}",
        f"Choi 2024, Table 1, RetNet {_size}: Pythia {_pythia} with retention in {_heads} heads of 256.",
        PYTHIA[_pythia],
        update_rule="retention",
        fast_weight_heads=_heads,
    )

_register_pythia(
    "fast_weight_lm_stripedmamba_430m",
    "Choi 2024, Table 1, StripedMamba 430m: Pythia 410m with Mamba in the place of attention.",
    PYTHIA["410m"],
    mixers="mamba",
)
