"""Tiny Hugging Face folders: the real implementations with random weights, and real tokenizers trained on a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from torch import nn

# --user-dir imports nothing where the package has been imported already, as here.
import fairseq_fastweights.models.huggingface_architectures
import fairseq_fastweights.tasks.fast_weight_language_modeling  # noqa: F401

GPT2 = {
    "vocab_size": 272,
    "n_positions": 24,
    "n_embd": 12,
    "n_layer": 2,
    "n_head": 3,
    "bos_token_id": 271,
    "eos_token_id": 271,
}
NEOX = {
    "vocab_size": 288,  # 16 of them fill the embeddings up
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 28,
    "max_position_embeddings": 24,
    "eos_token_id": 0,
}
TYPES = 272
LINE = "the cat sat on the mat, and the other cats sat there: that is the theme"
SPACES = ("  ", "   ", "    ")


def tokenizer(neox: bool, types: int = TYPES) -> Any:
    """A byte-level BPE with `types` word types: as GPT-2's, or with what Pythia's has besides."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|padding|>"] if neox else []
    spaces = SPACES if neox else ()
    trainer = trainers.BpeTrainer(
        vocab_size=types - (len(spaces) if neox else 1),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special,
        show_progress=False,
    )
    made.train_from_iterator([LINE] * 3, trainer)
    if neox:
        made.normalizer = normalizers.NFC()
        made.add_tokens([AddedToken(run, normalized=True) for run in spaces])
    else:
        made.add_special_tokens(["<|endoftext|>"])
    assert made.get_vocab_size() == types
    return made


def model(neox: bool, seed: int = 0, **settings: Any) -> nn.Module:
    """A model whose every weight matters."""
    import transformers

    torch.manual_seed(seed)
    if neox:
        made = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**{**NEOX, **settings}))
    else:
        made = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**GPT2, **settings}))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            scales = parameter.dim() == 1 and name.endswith("weight")  # of a layer norm
            parameter.normal_(mean=float(scales), std=0.3)
    return made.eval()


def save(
    folder: Path,
    made: nn.Module,
    *,
    form: str = "safetensors",
    shards: int = 1,
    two_files: bool = False,
) -> Path:
    """Writes a model and its tokenizer.

    Args:
        form: "safetensors", which transformers writes; "bin", as it once did, with masks and tied copies.
        shards: about how many files.
        two_files: whether the tokenizer is vocab.json and merges.txt.
    """
    folder.mkdir(parents=True)
    neox = made.config.model_type == "gpt_neox"
    size = sum(p.numel() * p.element_size() for p in made.parameters())
    if form == "safetensors":
        made.save_pretrained(folder, max_shard_size=size // shards + 1 if shards > 1 else "1GB")
    else:
        made.config.save_pretrained(folder)
        state = {name: weight.clone() for name, weight in made.state_dict().items()}
        if neox:
            state["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
            state["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9)
            state["gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = torch.ones(2)
        else:
            state["transformer.h.0.attn.bias"] = torch.ones(1, 1, 4, 4).tril()
            state["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
        save_bin(folder, state, shards)
    words = tokenizer(neox)
    if two_files:
        words.model.save(str(folder))
        vocabulary = json.loads((folder / "vocab.json").read_text())
        (folder / "vocab.json").write_text(json.dumps(vocabulary | {"<|endoftext|>": len(vocabulary)}))
    else:
        words.save(str(folder / "tokenizer.json"))
    return folder


def save_bin(folder: Path, state: dict[str, torch.Tensor], shards: int = 1) -> None:
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return
    places = {name: f"pytorch_model-{i % shards + 1:05d}-of-{shards:05d}.bin" for i, name in enumerate(state)}
    for file in set(places.values()):
        torch.save({name: state[name] for name, place in places.items() if place == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def load(folder: Path, **overrides: Any) -> tuple[nn.Module, Any]:
    """What fairseq makes of a converted folder: the model, and the task."""
    path = str(folder / "model.pt")
    overrides = {"data": str(folder), **overrides}
    (made,), _, task = checkpoint_utils.load_model_ensemble_and_task([path], arg_overrides=overrides)
    return made.eval(), task


class Numbers:
    """The source's numbers of word types, and fairseq's."""

    def __init__(self, dictionary: Any, vocabulary: int, end_of_text: int) -> None:
        self.ours = torch.tensor(
            [dictionary.eos() if i == end_of_text else dictionary.index(str(i)) for i in range(vocabulary)]
        )
        assert len(self.ours.unique()) == vocabulary and dictionary.unk() not in self.ours

    def translate(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.ours[tokens]

    def logits(self, ours: torch.Tensor) -> torch.Tensor:
        return ours[..., self.ours]


def random_tokens(made: nn.Module, batch: int = 3, time: int = 20) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(made.config.vocab_size, (batch, time), generator=generator)
