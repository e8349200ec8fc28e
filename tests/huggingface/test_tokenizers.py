"""The tokenizer of an exported folder gives the numbers that fairseq gives, and gives the text back."""

from __future__ import annotations

import pytest
import torch
import transformers
from fairseq.data import Dictionary

from fairseq_fastweights.conversion.__main__ import main
from fairseq_fastweights.conversion.byte_level_files import PIECES
from fairseq_fastweights.conversion.export import load_for_causal_lm
from fairseq_fastweights.huggingface import FastWeightForCausalLM
from tests.conversion import sources
from tests.conversion.test_tokenizer import byte_level
from tests.models.conftest import WORDS

LINES = ["w1 w2 w3", " w4\tw5  nothing ", "", "w6 <unk> </s> w7\x1cw8\u3000w9\x85w10 W1"]
TEXTS = [
    "the cat sat",
    "and  the other cats   sat there,",
    "Grüße: e\u0301 that <pad> is <s> the theme 🎉",
    "x<|endoftext|>y",
]


def test_words_are_those_of_the_lines(save, tmp_path):
    save(tmp_path / "run")
    model, tokenizer = load_for_causal_lm(tmp_path / "run")
    assert type(model) is FastWeightForCausalLM and not model.training
    (tmp_path / "data").mkdir()
    (tmp_path / "run" / "dict.txt").rename(tmp_path / "data" / "dict.txt")
    _, elsewhere = load_for_causal_lm(tmp_path / "run" / "checkpoint_best.pt", data=tmp_path / "data")
    assert elsewhere.get_vocab() == tokenizer.get_vocab()
    dictionary = Dictionary.load(str(tmp_path / "data" / "dict.txt"))
    expected = [2]
    for line in LINES:
        expected += dictionary.encode_line(line, add_if_not_exist=False).tolist()  # with </s> at its end
    assert tokenizer("\n".join(LINES) + "\n").input_ids == expected
    assert tokenizer.convert_ids_to_tokens(range(44)) == ["<s>", "<pad>", "</s>", "<unk>", *WORDS]
    assert tokenizer.decode(tokenizer("w1 w2").input_ids, skip_special_tokens=True) == "w1 w2"
    batch = tokenizer(["w1", "w2 w3 w4"], padding=True, return_tensors="pt")
    assert batch.input_ids.tolist() == [[1, 1, 2, 5], [2, 6, 7, 8]] and set(batch) == {"input_ids", "attention_mask"}
    assert batch.attention_mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]


def test_texts_begin_as_in_training(save, tmp_path):
    save(tmp_path / "run", "--add-bos-token")
    assert main(["to-huggingface", str(tmp_path / "run"), str(tmp_path / "folder")]) == 0
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")("w1").input_ids == [0, 5]
    assert main(["from-huggingface", str(tmp_path / "folder"), str(tmp_path / "back")]) == 0
    assert torch.load(tmp_path / "back" / "model.pt", weights_only=True)["cfg"]["task"]["add_bos_token"] is True


@pytest.mark.parametrize("neox", [False, True], ids=["gpt2", "neox"])
def test_pieces_are_those_of_the_byte_level_bpe(neox, save, tmp_path, capsys):
    """Of a model that was made of GPT-2 or GPT-NeoX, and trained on with fast weights."""
    source = sources.model(neox)
    sources.save(tmp_path / "theirs", source)
    assert main(["from-huggingface", str(tmp_path / "theirs"), str(tmp_path / "converted")]) == 0
    dictionary = Dictionary.load(str(tmp_path / "converted" / "dict.txt"))
    words = tuple(dictionary.symbols[4:])
    trained = save(tmp_path / "run", "--mixers gated,softmax:2 --mask-special-symbols", words=words)
    run = ["to-huggingface", str(tmp_path / "run"), str(tmp_path / "folder")]
    assert main(run) == 2  # nothing says where the BPE is
    error = capsys.readouterr().err
    assert "dict.txt: these are numbers" in error and "its encoder.json and vocab.bpe, or says words if" in error
    assert main([*run, "--tokenizer", str(tmp_path / "converted")]) == 0
    # The same of the converted folder and the checkpoint that was trained from it.
    last = str(tmp_path / "run" / "checkpoint_best.pt")
    other = ["to-huggingface", str(tmp_path / "converted"), str(tmp_path / "other"), "--checkpoint", last]
    assert main(other) == 0
    for name in ("tokenizer.json", "config.json", "fairseq/encoder.json"):
        assert (tmp_path / "folder" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    bpe = byte_level(tmp_path / "converted")
    for text in TEXTS:
        numbers = dictionary.encode_line(bpe.encode(text), add_if_not_exist=False, append_eos=False)
        assert tokenizer(text).input_ids == [2, *numbers.tolist()], text
        if "endoftext" not in text:
            assert tokenizer.decode(numbers) == bpe.decode(dictionary.string(numbers)), text
    assert tokenizer.pad_token_id == 1 and tokenizer.eos_token_id == tokenizer.bos_token_id == 2
    batch = tokenizer(TEXTS[:2], padding=True, return_tensors="pt")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    with torch.no_grad():
        expected = trained(batch.input_ids)[0]
        assert (model(**batch).logits - expected)[batch.attention_mask == 1].abs().max() <= 1e-5
    # A pipeline takes both.
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    made = pipeline("the cat", max_new_tokens=3, do_sample=False)[0]["generated_text"]
    assert made.startswith("the cat")

    assert main(["from-huggingface", str(tmp_path / "folder"), str(tmp_path / "back")]) == 0
    assert f"--byte-level-folder {tmp_path / 'back'}" in capsys.readouterr().out
    for name, place in (("dict.txt", "run"), *((name, "converted") for name in PIECES)):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / place / name).read_bytes()


def test_the_pieces_must_be_those_of_the_dictionary(save, tmp_path):
    """A dictionary of a text lacks pieces that others are made of; `--bpe gpt2` has no byte_level.json."""
    sources.save(tmp_path / "theirs", sources.model(False))
    assert main(["from-huggingface", str(tmp_path / "theirs"), str(tmp_path / "converted")]) == 0
    (tmp_path / "converted" / "byte_level.json").unlink()
    words = tuple(Dictionary.load(str(tmp_path / "converted" / "dict.txt")).symbols[4:])
    save(tmp_path / "run", words=words)
    _, tokenizer = load_for_causal_lm(tmp_path / "run", tokenizer=tmp_path / "converted")
    whole = tokenizer("the cat").input_ids
    _, numbers = load_for_causal_lm(tmp_path / "run", tokenizer="words")
    assert numbers(" ".join(words[number - 4] for number in whole[1:])).input_ids == whole
    save(tmp_path / "run", words=words[:-9])
    with pytest.raises(
        ValueError, match=r"encoder.json: of \d+ pieces dict.txt lacks \d+, '.*' for one; it must have all"
    ):
        load_for_causal_lm(tmp_path / "run", tokenizer=tmp_path / "converted")
