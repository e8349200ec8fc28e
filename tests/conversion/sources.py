"""Tiny Hugging Face folders: the real implementations with random weights, and real tokenizers trained on a line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from torch import Tensor, nn

from fairseq_fastweights.conversion.__main__ import main
from fairseq_fastweights.conversion.files.weight_files import WeightFiles
from fairseq_fastweights.conversion.from_huggingface import BUFFERS
from tests.conftest import import_plugin

GPT2 = {"vocab_size": 272, "n_positions": 24, "n_embd": 12, "n_layer": 2, "n_head": 3}
GPT2 |= {"bos_token_id": 271, "eos_token_id": 271}
# 16 of its entries pad the embeddings.
NEOX = {"vocab_size": 288, "max_position_embeddings": 24, "hidden_size": 16, "intermediate_size": 28}
NEOX |= {"num_hidden_layers": 2, "num_attention_heads": 2, "eos_token_id": 0}
TYPES = 272
SPACES = ("  ", "   ", "    ")


def tokenizer(neox: bool) -> Any:
    """A byte-level BPE with `TYPES` entries: as GPT-2's, or with the added tokens of Pythia's."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    size, special = (TYPES - len(SPACES), ["<|endoftext|>", "<|padding|>"]) if neox else (TYPES - 1, [])
    settings = {"initial_alphabet": made.pre_tokenizer.alphabet(), "special_tokens": special, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=size, **settings)
    made.train_from_iterator(["the cat sat on the mat, and the other cats sat there: that is the theme"] * 3, trainer)
    if neox:
        made.normalizer = normalizers.NFC()
        made.add_tokens([AddedToken(run, normalized=True) for run in SPACES])
    else:
        made.add_special_tokens(["<|endoftext|>"])
    assert made.get_vocab_size() == TYPES
    return made


def save_tokenizer(folder: Path, neox: bool, two_files: bool = False) -> Any:
    """Writes tokenizer.json, or vocab.json and merges.txt; returns the tokenizer."""
    words = tokenizer(neox)
    if two_files:
        words.model.save(str(folder))
        vocabulary = json.loads((folder / "vocab.json").read_text())
        (folder / "vocab.json").write_text(json.dumps(vocabulary | {"<|endoftext|>": len(vocabulary)}))
    else:
        words.save(str(folder / "tokenizer.json"))
    return words


def model(neox: bool, seed: int = 0, **settings: Any) -> nn.Module:
    """A model whose every weight matters."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.GPTNeoXConfig(**NEOX | settings) if neox else transformers.GPT2Config(**GPT2 | settings)
    made = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            scales = parameter.dim() == 1 and name.endswith("weight")  # of a layer norm
            parameter.normal_(mean=float(scales), std=0.3)
    return made.eval()


def save(folder: Path, made: nn.Module, *, in_bin: bool = False, shards: int = 1, two_files: bool = False) -> Path:
    """Writes a model, in about `shards` files, and its tokenizer; `in_bin` as once, with masks and tied copies."""
    folder.mkdir(parents=True)
    neox = made.config.model_type == "gpt_neox"
    if in_bin:
        made.config.save_pretrained(folder)
        state = {name: weight.clone() for name, weight in made.state_dict().items()}
        attention = "gpt_neox.layers.0.attention" if neox else "transformer.h.0.attn"
        state |= {f"{attention}.bias": torch.ones(1, 1, 4, 4).tril(), f"{attention}.masked_bias": torch.tensor(-1e4)}
        if neox:
            state[f"{attention}.rotary_emb.inv_freq"] = torch.ones(2)
        save_bin(folder, state, shards)
    else:
        size = sum(p.numel() * p.element_size() for p in made.parameters())
        made.save_pretrained(folder, max_shard_size=size // shards + (shards == 1) * 10**6 + 1)
    save_tokenizer(folder, neox, two_files)
    return folder


def save_bin(folder: Path, state: dict[str, Tensor], shards: int = 1) -> None:
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return
    places = {name: f"pytorch_model-{i % shards + 1:05d}-of-{shards:05d}.bin" for i, name in enumerate(state)}
    for file in set(places.values()):
        torch.save({name: state[name] for name, place in places.items() if place == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def set_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def load(folder: Path, source: Any) -> tuple[nn.Module, Any, Tensor]:
    """A converted folder as fairseq loads it: the model, its dictionary, and its ids of the original token ids."""
    import_plugin()
    path, overrides = str(folder / "model.pt"), {"data": str(folder)}
    (made,), _, task = checkpoint_utils.load_model_ensemble_and_task([path], arg_overrides=overrides)
    words, config = task.dictionary, source.config
    ours = [words.eos() if i == config.eos_token_id else words.index(str(i)) for i in range(config.vocab_size)]
    assert len(set(ours)) == len(ours) and words.unk() not in ours
    return made.eval(), words, torch.tensor(ours)


@torch.no_grad()
def check_round_trip(theirs: Path, source: Any, logits: Callable[[Tensor], Tensor], bound: float) -> dict[str, Any]:
    """Converts a folder to "ours" and "back" beside it: logits, also by decode steps, and then bits are as they were.

    Returns the converted model and its cache.
    """
    ours, back = theirs.with_name("ours"), theirs.with_name("back")
    assert main(["from-huggingface", str(theirs), str(ours)]) == 0
    model, words, ids = load(ours, source)
    tokens = torch.randint(len(ids), (3, 20), generator=torch.Generator().manual_seed(5))
    expected = logits(tokens)
    assert expected.std() > 0.5  # so that the bound says something
    whole = model(ids[tokens])
    out, scores = whole[0], model.get_normalized_probs(whole, log_probs=True)
    assert (scores[..., ids] - expected.log_softmax(-1)).abs().max() <= bound
    assert not model.get_normalized_probs(whole, log_probs=False)[..., [words.bos(), words.pad(), words.unk()]].any()
    assert (out[..., ids] - expected).abs().max() <= bound
    cache: dict = {}
    steps = [model(ids[tokens[:, :t]], incremental_state=cache)[0] for t in range(1, 11)]
    # Products of one row are added up in another order than those of many, on some processors.
    assert (torch.cat(steps, dim=1) - out[:, :10]).abs().max() <= bound * max(1, expected.abs().max())
    assert main(["to-huggingface", str(ours), str(back)]) == 0
    before, after = WeightFiles(theirs), WeightFiles(back)
    assert set(after.shapes) == {name for name in before.shapes if not name.endswith(BUFFERS)}
    for name in after.shapes:
        assert before.read(name).dtype == after.read(name).dtype and torch.equal(before.read(name), after.read(name))
    return {"model": model, "cache": cache}
