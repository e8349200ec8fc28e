"""examples/packed_documents.py: packed documents are what they are alone, and a model is trained with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from examples.packed_documents import NOTHING, Packer, main, stream
from fairseq_fastweights.huggingface import FastWeightConfig, FastWeightForCausalLM

DOCUMENTS = ["a b c", "d", "e f g h i j k", "b c d e f", "a a"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model for the letters, with a memory, attention and learned positions, and its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["</s>", "<pad>", *"abcdefghijk"])}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 0)])
    made: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<pad>")
    made.save_pretrained(tmp_path / "model")
    sizes = {"vocab_size": 13, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 8, "dropout": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    config = FastWeightConfig(**sizes, mixers=["gated-delta", "softmax"], position_embeddings="learned")
    FastWeightForCausalLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "fairseq").mkdir()
    return tmp_path


def test_a_row_goes_on_where_the_last_one_ended() -> None:
    packer = Packer(4)
    first = packer({"input_ids": [[7, 8], [7, 9, 5, 6, 4, 3, 2, 1]]})
    assert first["input_ids"] == [[7, 8, 7, 9], [5, 6, 4, 3]]
    assert first["position_ids"] == [[0, 1, 0, 1], [0, 1, 2, 3]]
    assert first["labels"] == [[NOTHING, 8, NOTHING, 9], [5, 6, 4, 3]]
    last = packer({"input_ids": [[7, 6]]})
    assert (last["input_ids"], last["position_ids"]) == ([[2, 1, 7, 6]], [[0, 1, 0, 1]])


@torch.no_grad()
def test_packed_documents_have_the_logits_that_they_have_alone(folder: Path) -> None:
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text, "other": 1}) + "\n" for text in DOCUMENTS))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    model = FastWeightForCausalLM.from_pretrained(folder / "model").eval()
    (row,) = stream([str(folder / "texts.jsonl")], tokenizer, 23, buffer=1, seed=1)
    packed = {name: torch.tensor([values]) for name, values in row.items()}
    assert packed["input_ids"].tolist() == [[number for text in DOCUMENTS for number in tokenizer(text).input_ids]]
    alone = [model(**tokenizer(text, return_tensors="pt")).logits[0] for text in DOCUMENTS]
    assert (model(**packed).logits[0] - torch.cat(alone)).abs().max() <= 1e-5
    with pytest.raises(ValueError, match=r"FILES end in \.json, \.txt; all must end in \.jsonl, \.json or \.txt"):
        stream(["a.txt", "b.json"], None, 4, 1, 1)


def test_a_model_is_trained_and_saved(folder: Path) -> None:
    (folder / "texts.txt").write_text("\n\n".join(DOCUMENTS * 40))
    sizes = ["--length", "16", "--batch-size", "4", "--updates", "40", "--lr", "0.05"]
    main([str(folder / "model"), str(folder / "out"), str(folder / "texts.txt"), *sizes])
    text = transformers.AutoTokenizer.from_pretrained(folder / "out")(DOCUMENTS[2], return_tensors="pt")
    models = (FastWeightForCausalLM.from_pretrained(folder / name).eval() for name in ("model", "out"))
    before, after = (float(model(**text, labels=text.input_ids).loss) for model in models)
    assert after < 0.6 * before and (folder / "out" / "fairseq").is_dir()
