"""Examples of one file, and the page "Get started": the notebook runs, packed documents train, its numbers come out."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from examples.packed_documents import NOTHING, Packer, main, stream
from fairseq_fastweights.huggingface import FastWeightConfig, FastWeightForCausalLM
from tests.conftest import ROOT, command
from tests.test_documentation import commands

PAGE = ROOT / "docs" / "get-started.md"


@pytest.mark.slow
def test_the_commands_of_the_tutorial_give_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More or less, as Python's help pages, the text, differ."""
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    exec(re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)[0], {})
    log, more = "", {"train": "--cpu --num-workers 0 --log-format simple".split(), "eval-lm": ["--cpu"]}
    for name, words in list(commands(PAGE))[:4]:
        words = [str(ROOT / word) if word == "fairseq_fastweights" else word for word in (*words, *more.get(name, ()))]
        log += command(name.replace("-", "_"), *words)
    for told, found in (
        (r"dictionary of about ([\d,]+) types.* text of about ([\d,]+) tokens", r"(\d+) (?:types\n|tokens)"),
        (r"perplexity of about (\d+) after the .* of (\d+) after the .* of (\d+) at", r"'valid' .* ppl ([\d.]+)"),
        (r"test perplexity of about ([\d.]+) from .* of about ([\d.]+) from", r"Perplexity: ([\d.]+)"),
    ):
        [there], here = re.findall(told, " ".join(text.split())), re.findall(found, log)
        assert [*map(float, here[: len(there)])] == pytest.approx([float(x.replace(",", "")) for x in there], rel=0.2)


def test_the_notebook_answers_in_its_first_cell_and_the_others_run(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    pytest.importorskip("matplotlib").use("agg")
    monkeypatch.setattr("torch.set_num_threads", lambda threads: None)
    cells = json.loads((ROOT / "examples" / "first_model.ipynb").read_text())["cells"]
    mark = "#%%\n"
    code = mark.join("".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code")
    sizes = {"= 600, 16, 128": "= 3, 2, 16", "= 128, 2": "= 16, 1", "(64, 4096)": "(6, 40)", "most=20000": "most=100"}
    for size, small in sizes.items():
        assert code.count(size) == 1
        code = code.replace(size, small)
    first, _, rest = code.partition(mark)
    names: dict[str, Any] = {}
    exec(first, names)
    kept = re.findall(
        r"^after +\d+ tokens (\S+) +keeps +(\d+) kB .* takes +[\d.]+ ms$", capsys.readouterr().out, re.MULTILINE
    )
    assert [name for name, _ in kept] == ["gated-delta", "softmax"] * 2
    assert kept[0] == kept[2] and int(kept[1][1]) < int(kept[3][1])
    exec(rest, names)
    assert set(names["curves"]) == {"gated-delta", "softmax"} and len(names["curves"]["softmax"]) == 3
    assert {line.get_label() for line in names["axes"].get_lines()} == set(names["curves"])
    assert len(names["scores"]) == 3 and names["written"].shape[1] == names["prompt"].shape[1] + 16


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
    (tmp_path / "texts.txt").write_text("\n\n".join(DOCUMENTS * 40))
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--lr nan", "--lr is nan; it must be a finite number above 0"),
        ("--batch-size 0", "--batch-size is 0; it must be at least 1"),
        ("--updats 3", "did you mean --updates?"),
    ],
)
def test_packed_documents_refuse_a_wrong_option_at_once(typed: str, says: str, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["model", "target", "text.txt", *typed.split()])
    assert capsys.readouterr().err.strip().endswith(says)


def test_a_row_of_packed_documents_goes_on_where_the_last_one_ended() -> None:
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


def test_a_model_is_trained_on_packed_documents_and_saved(folder: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(folder)
    for files, message in (("a.txt b.json", "FILES end in .json, .txt; all"), ("a.txt", "FILES have a.txt")):
        with pytest.raises(SystemExit):
            main(["no model", "out", *files.split()])
        assert message in capsys.readouterr().err
    main("model out texts.txt --length 16 --batch-size 4 --updates 40 --lr 0.05".split())
    text = transformers.AutoTokenizer.from_pretrained(folder / "out")(DOCUMENTS[2], return_tensors="pt")
    models = (FastWeightForCausalLM.from_pretrained(folder / name).eval() for name in ("model", "out"))
    before, after = (model(**text, labels=text.input_ids).loss.item() for model in models)
    assert after < 0.6 * before and (folder / "out" / "fairseq").is_dir()
