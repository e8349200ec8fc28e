"""examples/xatl/lambada.py: the last words of passages."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from .conftest import make_newer

lambada = import_module("lambada")

# fairseq and what it calls, attributed to the line that calls fairseq.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

PASSAGES = ["the cat sat on the mat", "that is the  theme", "and the other cats sat there:"]


def write_passages(path: Path, *texts: object) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.slow
def test_last_words_are_scored_as_one_would_by_hand(pythia: Path, tmp_path: Path, capsys) -> None:
    """Against transformers' model and tokenizer, a passage at a time."""
    import transformers

    folder = pythia.parent / "huggingface"
    model = transformers.GPTNeoXForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    # The last passage ends as the model would have it.
    draw, words = random.Random(0), "the cat sat on mat and other cats there that is theme".split()
    word = ""
    while not re.fullmatch(r" \w+", word):
        text = " ".join(draw.choices(words, k=6))
        with torch.no_grad():
            word = tokenizer.decode([model(torch.tensor([tokenizer(text).input_ids])).logits[0, -1].argmax().item()])
    passages = [*PASSAGES, text + word]
    total, said = 0.0, 0
    for text in passages:
        context = tokenizer(text[: text.rindex(" ")].rstrip()).input_ids
        whole = tokenizer(text).input_ids
        with torch.no_grad():
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


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"text": "two words"}\n{"text": "one"}\n', "line 2 must be a JSON object whose text is a passage"),
        ('{"text": " one "}\n', "line 1 must be"),
        ('{"text": "two words"\n', "line 1 must be"),
        ('["two words"]\n', "line 1 must be"),
        ('{"text": 3}\n', "line 1 must be"),
        ("", "is empty"),
        (None, "No such file"),
        ('{"text": "two words"}\n', "dict.txt; SOURCE must be a converted model"),
    ],
)
def test_what_is_no_test_is_refused(lines: str | None, message: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "file.jsonl"
    if lines is not None:
        file.write_text(lines)
    assert lambada.main([str(tmp_path), str(tmp_path), str(file)]) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("lambada*"))
