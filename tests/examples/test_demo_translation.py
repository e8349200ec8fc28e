"""The demo of translation: its text, its scripts, what it shows, and that it translates."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import pytest

from .conftest import refused

comparison, number_text, pieces, run, translations = (
    import_module(f"demo_translation.{name}") for name in ("comparison", "number_text", "pieces", "run", "translations")
)

GENERATED = """2026-01-01 12:00:00 | INFO | fairseq_cli.generate | loading model(s) from checkpoint_best.pt
S-1\ttwo
T-1\tzwei
H-1\t-0.1\tzwei
D-1\t-0.1\tzwei
P-1\t-0.1 -0.2
D-0\t-0.2\teine Million
D-2\t-inf\t
2026-01-01 | INFO | fairseq_cli | Translated 1,003 sentences (9,954 tokens) in 4.0s (250.91 sentences/s, 2.5 tokens/s)
"""


def test_numbers_are_drawn_once_and_for_all_and_written_in_the_same_line_of_both_languages(tmp_path: Path) -> None:
    splits = number_text.split_numbers(number_text.SIZES)
    assert {split: len(numbers) for split, numbers in splits.items()} == number_text.SIZES
    numbers = [number for split in splits.values() for number in split]
    assert len(set(numbers)) == len(numbers)
    assert min(numbers) >= 1 and max(numbers) < 10**number_text.DIGITS
    digits = [len(str(number)) for number in splits["test"]]
    # Of shorter ones there are too few, which may be used up.
    assert all(60 < digits.count(length) < 160 for length in range(4, number_text.DIGITS + 1))
    assert set(range(1, 10)) <= set(number_text.split_numbers({"train": 30_000, "test": 1})["train"])
    small = number_text.split_numbers({"train": 300, "valid": 20, "test": 30})
    assert small["test"][:3] == [578, 8_548_059_994, 559_411]

    number_text.write_text({"test": [1, 342_007, 2_001_000_030]}, tmp_path)
    english, german = ((tmp_path / f"test.{x}").read_text(encoding="utf-8").split("\n") for x in ("en", "de"))
    assert english[:2] == ["one", "three hundred and forty-two thousand and seven"]
    assert german == ["eins", "dreihundertzweiundvierzigtausendsieben", "zwei Milliarden eine Million dreißig", ""]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    assert number_text.main([str(folder), "--train", "300", "--valid", "20", "--test", "30"]) == 0
    return folder


@pytest.fixture(scope="module")
def model(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of pieces."""
    path = tmp_path_factory.mktemp("pieces") / "joint.model"
    assert pieces.main(["train", str(path), str(text / "train.en"), str(text / "train.de"), "--pieces", "100"]) == 0
    return path


def test_pieces_put_together_are_the_text_and_the_same_every_time(text: Path, model: Path, tmp_path: Path) -> None:
    names = ["test.en", "test.de", "empty.en"]
    (text / "empty.en").write_text("one\n\ntwo\n")
    assert pieces.main(["encode", str(model), str(tmp_path), *(str(text / name) for name in names)]) == 0
    seen = set()
    for name in names:
        cut = (tmp_path / name).read_text(encoding="utf-8")
        joined = [line.replace(" ", "").replace("▁", " ").strip() for line in cut.split("\n")]
        assert joined == (text / name).read_text(encoding="utf-8").split("\n")
        seen |= set(cut.split())
    assert 50 < len(seen) <= 100
    pieces.train([text / "train.en", text / "train.de"], tmp_path / "again.model", 100)
    assert (tmp_path / "again.model").read_bytes() == model.read_bytes()


def test_translations_come_in_the_order_of_the_source(tmp_path: Path) -> None:
    (tmp_path / "generated").write_text(GENERATED, encoding="utf-8")
    (tmp_path / "source").write_text("one million\ntwo\nzero\n", encoding="utf-8")
    assert translations.main([str(tmp_path / name) for name in ("generated", "source", "out")]) == 0
    assert (tmp_path / "out").read_text(encoding="utf-8") == "eine Million\nzwei\n\n"


@refused("""
number_text out --test 0 -> --test is 0; it must be at least 1
number_text out --train 999999 -> are 1,001,499 together; they must be 1,000,000 at most
number_text texts -> test.de is there already
pieces train new.model latin-1 -> latin-1 is not UTF-8 text: .* at byte 2
pieces train new.model good --pieces 100000 -> Vocabulary size too high
pieces train good good -> good is there already
pieces encode missing out good -> there is no model missing
pieces encode MODEL . good -> good is there already
pieces encode MODEL out good texts/good -> two files have the same name
translations generated four out -> 1 of 4 lines have no translation, line 4 the first of them
translations generated two out -> there are 3 translations of 2 lines
translations twice good out -> line 2 has two translations; generate with --nbest 1
translations generated good texts/test.de -> test.de is there already
""")
def test_what_the_scripts_cannot_use_is_named_and_nothing_is_written(
    env: dict[str, str], words: list[str], message: str, model: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    files = {"good": "one\ntwo\nthree\n", "texts/good": "one\n", "texts/test.de": "years of work", "two": "one\ntwo\n"}
    files |= {"four": "one\n" * 4, "generated": GENERATED, "twice": f"{GENERATED}D-1\t-0.5\tdrei\n"}
    files |= {"latin-1": "größer\n"}
    for name, content in files.items():
        Path(name).write_text(content, encoding="latin-1")
    script = import_module(f"demo_translation.{words[0]}")
    assert script.main([str(model) if word == "MODEL" else word for word in words[1:]]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"{words[0]}.py: ") and error.count("\n") == 1 and re.search(message, error)
    left = {str(path): path.read_text(encoding="latin-1") for path in Path().rglob("*") if path.is_file()}
    assert left == files


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({}, ["- s2 - reference: r2 - A: r2 - B: r2", "", "No translation is wrong."]),
        ({"B": [2]}, ["- s2 - reference: r2 - A: r2 - B, wrong: ?"]),
        ({"A": [4], "B": [3]}, ["", "One that the A gets wrong:", "", "- s4 - reference: r4 - A, wrong: ? - B: r4"]),
    ],
)
def test_a_wrong_translation_is_shown_if_there_is_one(wrong: dict[str, list[int]], expected: list[str]) -> None:
    source, reference = [f"s{i}" for i in range(8)], [f"r{i}" for i in range(8)]
    outputs = {title: ["?" if i in wrong.get(title, []) else f"r{i}" for i in range(8)] for title in "AB"}
    lines = comparison.format_examples(source, reference, outputs).replace("\n  -", " -").splitlines()
    assert lines[:3] == ["The first of the test text:", "", "- s0 - reference: r0 - A: r0 - B: r0"]
    assert lines[-len(expected) :] == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # fairseq's own
def test_numbers_that_were_never_seen_are_translated(tmp_path: Path, capsys, fairseq) -> None:
    """What `make demo-translation` does in a third of the updates, without the softmax Transformer beside it."""
    out = tmp_path / "out"
    arguments = ["--out", str(out), "--models", "linear-transformer", "--updates", "450"]
    assert run.main(arguments) == 0
    shown = capsys.readouterr().out
    assert all(x in shown for x in ("fairseq-train", "fairseq-generate", "translations.py", "sacrebleu"))
    table = (out / "table.md").read_text(encoding="utf-8")
    [row] = [comparison.Row(**row) for row in json.loads((out / "results.json").read_text())["rows"]]
    assert table in shown and table.startswith(comparison.format_rows([row])) and row.signature in table
    assert row.bleu >= 30, shown  # 45; what has not learned to count has none
    assert row.exact >= 0.2 * row.lines
    assert "tok:13a" in row.signature and "smooth:exp" in row.signature
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    # By another way than the demo's: what lies in the folder is what was scored.
    reference, output, seen = (
        (out / name).read_text(encoding="utf-8").splitlines()
        for name in ("text/test.de", "linear-transformer/translations/test.de", "text/train.de")
    )
    assert sum(a == b for a, b in zip(reference, output, strict=True)) == row.exact
    assert not set(seen) & set(reference)

    assert run.main(arguments) == 0
    shown_again = capsys.readouterr().out
    assert "fairseq-" not in shown_again and table in shown_again

    # The Transformer beside it differs in attention alone, which has the same projections.
    other = run.TranslationDemo(run._parse(["--out", str(out), "--updates", "1"]), run.MODELS, 0)
    step = other.train("transformer", other.binarize(other.encode(text := other.make_text(), other.learn_pieces(text))))
    log = fairseq([*step.command, "--save-dir", str(tmp_path / "transformer")])
    counted = re.search(r"num\. shared model params: ([\d,]+)", log)
    assert counted is not None
    copies = comparison.count_copies(tmp_path / "transformer" / "checkpoint_best.pt")
    assert int(counted[1].replace(",", "")) - copies == row.parameters
