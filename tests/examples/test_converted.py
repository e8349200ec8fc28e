"""examples/gpt2 and examples/xatl: text is cut into a converted model's subwords, and last words are scored."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import re
import shutil
import subprocess
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from .conftest import DOCUMENTS, EXAMPLES, make_newer, run_script

encode, lambada = import_module("encode"), import_module("lambada")


@pytest.mark.slow
def test_prepared_text_is_the_documents_in_the_models_subwords(gpt2: Path, gpt2_data: Path) -> None:
    from fairseq.data import Dictionary, data_utils

    from fairseq_fastweights.data.byte_level_bpe import ByteLevelBPE

    assert {path.name for path in gpt2_data.parent.iterdir()} == {"bin", "text"}
    assert (gpt2_data / "dict.txt").read_text() == (gpt2 / "dict.txt").read_text()
    dictionary = Dictionary.load(str(gpt2_data / "dict.txt"))
    decode = ByteLevelBPE(Namespace(byte_level_folder=str(gpt2))).decode
    for split, documents in DOCUMENTS.items():
        lines = data_utils.load_indexed_dataset(str(gpt2_data / split), dictionary)
        assert all(line[-1] == dictionary.eos() and dictionary.unk() not in line for line in lines)
        # In the midst of a text, <|endoftext|> is the same symbol as the one between texts.
        assert [decode(" ".join(dictionary[number] for number in line[:-1])) for line in lines] == documents
    again = run_script(EXAMPLES / "gpt2" / "prepare.sh", gpt2_data, gpt2, "FOLDER")
    assert again.returncode == 0 and "is finished" in again.stdout


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tokenizer that needs no model: a subword for each character."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name in encode.TOKENIZER:
        (folder / name).write_text(name)
    monkeypatch.setattr(encode, "load_tokenizer", lambda source: lambda text: " ".join(map(str, map(ord, text))))
    return folder


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_documents_are_what_stands_between_separators_or_on_lines_of_json(packed: str, tmp_path: Path) -> None:
    if packed == ".zst" and shutil.which("zstd") is None:
        pytest.skip("needs zstd")
    texts = ["a\u2028b\r\nc\n\nd", "  e ", "f<|endoftext|>\ng"]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in [*texts[:2], " \n", texts[2]])
    for kind, content in ((".txt", "\n<|endoftext|>\n".join([*texts[:2], "", texts[2]]) + "\n"), (".jsonl", lines)):
        path = tmp_path / f"text{kind}{packed}"
        path.write_bytes(gzip.compress(content.encode()) if packed == ".gz" else content.encode())
        if packed == ".zst":
            path.write_bytes(subprocess.run(["zstd", "-qc", path], capture_output=True, check=True).stdout)
        assert list(encode.documents(path)) == texts


def test_no_more_documents_are_taken_than_asked_for_and_nothing_is_done_twice(source: Path, tmp_path: Path, capsys):
    (tmp_path / "train.jsonl").write_text('{"text": "abc"}\n' * 9)
    (tmp_path / "valid.jsonl").write_text('{"text": "de"}\n')

    def trained(most: str) -> str:
        assert encode.main([str(source), str(tmp_path), str(tmp_path), "--train-tokens", most]) == 0
        return (tmp_path / "train.bpe").read_text()

    # Each has 3 subwords and an end: two have 8, three 12.
    assert trained("9") == "97 98 99\n" * 3 and "3 documents, 12 tokens" in capsys.readouterr().out
    assert (tmp_path / "valid.bpe").read_text() == "100 101\n"
    before = (tmp_path / "valid.bpe").stat()
    assert trained("8") == "97 98 99\n" * 2 and (tmp_path / "valid.bpe").stat() == before
    (tmp_path / "train.jsonl").write_text('{"text": "f"}\n')
    assert trained("8") == "102\n"


def test_text_that_is_not_right_is_refused_and_nothing_looks_finished(source: Path, tmp_path: Path, capfd) -> None:
    (tmp_path / "valid.txt").write_text("a\n")
    damaged = "is damaged, or not what its name says"
    for name, content, message in (
        ("train.jsonl", b'{"text": "a"}\n{"texts": "b"}\n', "train.jsonl: line 2 is no JSON object with a text in it"),
        *(("train.jsonl", line, "line 1 is no JSON object") for line in (b'{"text": "b"\n', b'{"text": 1}\n')),
        ("train.txt", b"a\n\xff\n", "train.txt is not text in UTF-8"),
        ("train.txt", b" \n<|endoftext|>\n", "there is no text"),
        ("train.txt.gz", b"no such thing", damaged),
        ("train.txt.gz", gzip.compress(b"a\n" * 99, mtime=0)[:-9], damaged),
        ("train.txt.zst", b"no such thing", damaged if shutil.which("zstd") else "no program zstd"),
    ):
        (tmp_path / name).write_bytes(content)
        assert encode.main([str(source), str(tmp_path), str(tmp_path)]) == 1
        assert message in capfd.readouterr().err and not [*tmp_path.glob("*.bpe"), *tmp_path.glob("*.json")]
        (tmp_path / name).unlink()


PASSAGES = ["the cat sat on the mat", "that is the  theme", "and the other cats sat there:"]


def write_passages(path: Path, *texts: object) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of fairseq and what it calls
def test_last_words_are_scored_as_one_would_by_hand(pythia: Path, tmp_path: Path, capsys) -> None:
    """Against transformers' model and tokenizer, a passage at a time."""
    import transformers

    folder = pythia.parent / "huggingface"
    model = transformers.GPTNeoXForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    # The last passage ends as the model would have it.
    draw, words = random.Random(0), "the cat sat on mat and other cats there that is theme".split()
    word = ""
    with torch.no_grad():
        while not re.fullmatch(r" \w+", word):
            text = " ".join(draw.choices(words, k=6))
            word = tokenizer.decode([model(torch.tensor([tokenizer(text).input_ids])).logits[0, -1].argmax().item()])
        passages = [*PASSAGES, text + word]
        total, said = 0.0, 0
        for text in passages:
            context, whole = (tokenizer(part).input_ids for part in (text[: text.rindex(" ")].rstrip(), text))
            logits = model(torch.tensor([whole[:-1]])).logits[0].log_softmax(-1)
            steps = range(len(context) - 1, len(whole) - 1)
            total += sum(logits[t, whole[t + 1]].item() for t in steps)
            said += all(logits[t].argmax().item() == whole[t + 1] for t in steps)
    assert said == 1

    shutil.copy(pythia / "model.pt", tmp_path / "checkpoint_best.pt")
    file = write_passages(tmp_path / "passages.jsonl", *passages)
    for batch in ("1", "3"):
        (tmp_path / "lambada.json").unlink(missing_ok=True)
        assert lambada.main([str(pythia), str(tmp_path), str(file), "--batch", batch, "--cpu"]) == 0
        result = json.loads((tmp_path / "lambada.json").read_text())
        assert result["passages"] == len(passages) and result["accuracy"] == pytest.approx(said / len(passages))
        assert result["perplexity"] == pytest.approx(math.exp(-total / len(passages)), rel=1e-4)
    assert capsys.readouterr().out.count("LAMBADA, 4 passages: accuracy") == 2


def test_a_result_stands_for_its_checkpoint_and_its_file_alone(tmp_path: Path, monkeypatch, capsys) -> None:
    """With a model's score in the model's place, another one each time."""
    accuracies = iter((0.25, 0.5, 0.75, 0.125))
    monkeypatch.setattr(lambada, "load", lambda *_: (torch.nn.Identity(), Namespace(pad=int), str.strip))
    monkeypatch.setattr(lambada, "encode_passage", lambda *_: None)
    monkeypatch.setattr(lambada, "score", lambda *_: {"passages": 2, "accuracy": next(accuracies), "perplexity": 9.0})
    first, second = (write_passages(tmp_path / f"{name}.jsonl", *PASSAGES) for name in ("first", "second"))
    best, last = (tmp_path / f"checkpoint_{name}.pt" for name in ("best", "last"))
    best.touch()
    last.touch()

    def printed(file: Path, *flags: str) -> str:
        assert lambada.main([str(tmp_path), str(tmp_path), str(file), "--cpu", *flags]) == 0
        return re.findall(r"accuracy (\S+) %", capsys.readouterr().out)[0]

    other = ("--checkpoint", "checkpoint_last.pt")
    assert printed(first) == printed(first) == "25.00"
    assert printed(first, *other) == printed(first, *other) == "50.00"
    assert printed(first) == "25.00"
    assert {path.name for path in tmp_path.glob("lambada*")} == {"lambada.json", "lambada.checkpoint_last.json"}
    make_newer(best)
    assert printed(first) == "75.00" and printed(first, *other) == "50.00"
    assert printed(second, *other) == "12.50"
    (tmp_path / "lambada.checkpoint_last.json").rename(tmp_path / "lambada.json")  # by its name of another checkpoint
    os.utime(tmp_path / "lambada.json", (2e9, 2e9))
    with pytest.raises(StopIteration):
        printed(second)
    assert lambada.main([str(tmp_path), str(tmp_path), str(first), "--checkpoint", "a/x.pt"]) == 1
    assert "--checkpoint is a/x.pt; it must be the name of a file in OUT" in capsys.readouterr().err


def test_what_is_no_test_is_refused(tmp_path: Path, capsys) -> None:
    file = tmp_path / "file.jsonl"
    for lines, message in (
        (None, "No such file"),
        ("", "is empty"),
        ('{"text": "two words"}\n{"text": "one"}\n', "line 2 must be a JSON object whose text is a passage"),
        *((line, "line 1 must be") for line in ('{"text": " one "}', '{"text": "a b"', '["two words"]', '{"text": 3}')),
        ('{"text": "two words"}\n', "dict.txt; SOURCE must be a converted model"),
    ):
        if lines is not None:
            file.write_text(lines)
        assert lambada.main([str(tmp_path), str(tmp_path), str(file)]) == 1
        assert message in capsys.readouterr().err
        assert not list(tmp_path.glob("lambada*"))
