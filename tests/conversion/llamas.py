"""Tiny Llama- and Qwen-shaped folders: the real implementations with random weights, and tokenizers as they have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

SIZES = {"vocab_size": 400, "hidden_size": 24, "intermediate_size": 28, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": 1}

# Of a layer of Gated DeltaNet and one of attention.
DELTA = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_key_head_dim": 5, "linear_value_head_dim": 3, "linear_conv_kernel_dim": 3}
HYBRID = {"OlmoHybrid": DELTA | {"pad_token_id": None}, "Qwen3_5": DELTA | {"head_dim": 8}}
CONFIGS = {"Qwen3_5": "Qwen3_5TextConfig"}
TEXT = "the cat sat on the mat, and the other cats sat there: that is the theme"


def tokenizer(pieces: bool = False) -> Any:
    """Split by an expression of its own, as Llama 3's and Qwen's; or `pieces` with a mark for spaces, as Llama 2's."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    special = ["<|begin|>", "<|end|>"]
    if pieces:
        bytes_ = [f"<0x{i:02X}>" for i in range(256)]
        made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<|begin|>"))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        trainer = trainers.BpeTrainer(vocab_size=390, special_tokens=[*special, *bytes_], show_progress=False)
    else:
        made = Tokenizer(models.BPE(ignore_merges=True))
        by_words = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|[^\p{N}\s]+|\s+"), behavior="isolated")
        in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence([by_words, in_bytes]), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=alphabet, special_tokens=special, show_progress=False
        )
    made.train_from_iterator([TEXT] * 3, trainer)
    return made


def model(kind: str, **settings: Any) -> nn.Module:
    """A model whose every weight matters; `kind` as transformers names its class."""
    import transformers

    transformers.logging.set_verbosity_error()  # of kernels that are not installed
    torch.manual_seed(0)
    config = getattr(transformers, CONFIGS.get(kind, f"{kind}Config"))(**{**SIZES, **HYBRID.get(kind, {}), **settings})
    made = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        # Smaller ones for delta rules: a chunk of steps is a product, which enlarges rounding.
        std = 0.13 if kind in HYBRID else 0.3
        for name, parameter in made.named_parameters():
            centered = kind == "Qwen3_5" and not name.endswith("linear_attn.norm.weight")  # they multiply by 1 + w
            parameter.normal_(mean=float("norm" in name and not centered), std=std)
    return made.eval()


def describe(folder: Path, config: dict[str, Any], *, begins: bool = False) -> None:
    """Writes a tokenizer_config.json; `begins`: whether the tokenizer puts its first word before texts, as Llama's."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if begins:
        first, text = {"SpecialToken": {"id": "<|begin|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
        words = {"<|begin|>": {"id": "<|begin|>", "ids": [0], "tokens": ["<|begin|>"]}}
        after = {"type": "TemplateProcessing", "single": [first, text], "pair": [first, text], "special_tokens": words}
        made = json.loads((folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps(made | {"post_processor": after}))


def save(folder: Path, made: nn.Module, *, pieces: bool = False, shards: int = 1) -> Path:
    folder.mkdir(parents=True)
    size = sum(p.numel() * p.element_size() for p in made.parameters())
    made.save_pretrained(folder, max_shard_size=size // shards + 1 if shards > 1 else "1GB")
    words = tokenizer(pieces)
    words.enable_truncation(3)  # as somebody last used it
    words.enable_padding(length=9)
    words.save(str(folder / "tokenizer.json"))
    return folder
