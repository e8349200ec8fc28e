"""The demos of language models and of translation: what they read, refuse, run and show, and how `make` starts them."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import re
import shlex
import shutil
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from .conftest import EXAMPLES, ROOT, interrupt, refused

comparison, corpora, run, steps = map(import_module, ("demo.comparison", "demo.corpora", "demo.run", "common.steps"))
scores, number_text, pieces, translation, translations = (
    import_module(f"demo_translation.{name}") for name in ("comparison", "number_text", "pieces", "run", "translations")
)
grid, synthetic = map(import_module, ("synthetic.run", "synthetic.demo"))


@pytest.mark.parametrize("demo", [run, translation, grid, synthetic])
def test_what_cannot_be_is_named_before_any_work(demo: Any, tmp_path: Path, monkeypatch, capsys) -> None:
    """Wrong options, a missing package, a folder of other files."""
    out = [*["--setting", "1"] * (demo is grid), "--out", str(tmp_path)]
    if demo in (run, translation):
        for option, value in (("--updates", "0"), ("--updates", "x"), ("--seed", "-1"), ("--models", "lstm")):
            with pytest.raises(SystemExit, match="2"):
                demo.main([option, value, *out])
            assert option in capsys.readouterr().err
    if demo is not grid:
        monkeypatch.setattr("common.commands.find_spec", lambda name: None if name == "matplotlib" else name)
        assert demo.main(out) == 1 and "there is no package matplotlib" in capsys.readouterr().err
        monkeypatch.undo()
    assert not list(tmp_path.iterdir())
    (tmp_path / "made-by-another-demo").write_text("years of work")
    assert demo.main(out) == 1 and "holds other files" in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["years of work"]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make on the PATH")
def test_make_starts_the_demos_with_a_folder_of_any_name() -> None:
    """As from a shell, though make may have started the tests."""
    env = {name: value for name, value in os.environ.items() if name not in ("DATA", "MAKEFLAGS", "MFLAGS")}

    def words(*arguments: str, **variables: str) -> list[str]:
        make, how = ["make", "--no-print-directory", "-n", *arguments], {"cwd": ROOT, "env": {**env, **variables}}
        return shlex.split(subprocess.run(make, **how, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])

    python = ".venv/bin/python"
    assert words("demo") == words("demo", "DATA=") == [python, "examples/demo/run.py"]
    for name in ("it's", "two words", "$HOME a$b", '"quoted"', "back\\slash", "a,b;c&d"):
        expected = [python, "examples/demo/run.py", "--data", f"/tmp/{name}"]
        assert words("demo", f"DATA=/tmp/{name}") == words("demo", DATA=f"/tmp/{name}") == expected
    assert words("demo-translation") == [python, "examples/demo_translation/run.py"]
    assert words("demo-synthetic") == [python, "examples/synthetic/demo.py"]


def test_the_splits_of_the_english_hold_all_of_it_and_share_nothing() -> None:
    english = corpora.split_english()
    titles = {article.strip().split("\n")[0] for article in corpora.topics.values()}
    for title in map(corpora.tokenize, titles):
        assert any(title in lines for lines in english.values()), title
    # Headings and the like may coincide, sentences may not.
    train, valid, test = ({line for line in lines if len(line.split()) >= 16} for lines in english.values())
    assert not train & test and not train & valid and not valid & test
    tokens = {split: sum(len(line.split()) + 1 for line in lines) for split, lines in english.items()}
    assert sum(tokens.values()) > 60_000
    assert all(0.08 < tokens[split] / sum(tokens.values()) <= 0.1 for split in ("valid", "test"))
    names = list(corpora.topics)
    random.Random(0).shuffle(names)
    assert corpora.split_english({name: corpora.topics[name] for name in names}) == english


def test_articles_with_a_common_paragraph_stay_together_and_repeat_nothing() -> None:
    paragraphs = {name: " ".join(f"{name}{i}" for i in range(20)) for name in "abcdefghijklmnopqrstuvwxyz"}
    articles = {name: f"Title {name}\n\n{paragraph}" for name, paragraph in paragraphs.items()}
    articles["a"] += f"\n\n{paragraphs['b']}\n\n{paragraphs['c']}"
    splits = corpora.split_english(articles)
    lines = [line for split in splits.values() for line in split]
    assert lines.count(paragraphs["b"]) == lines.count(paragraphs["c"]) == 1
    [home] = [texts for texts in splits.values() if paragraphs["a"] in texts]
    assert {paragraphs["b"], paragraphs["c"], "Title b", "Title c"} <= set(home)


def test_wrapped_lines_are_put_together_and_words_and_marks_are_tokens() -> None:
    article = """Title\n*****\n
These lines end where they don't because the next word was too long
for "them".  Not so the next ones:

   if x:
       y
   z = [1, ...]
"""
    assert corpora.split_english({"article": article})["train"] == [
        "Title",
        'These lines end where they don\'t because the next word was too long for " them " . Not so the next ones :',
        *("if x :", "y", "z = [ 1 , ... ]"),
    ]


def test_texts_are_found_by_their_usual_names_and_what_cannot_be_used_is_named(tmp_path: Path, capsys) -> None:
    (folder := tmp_path / "texts").mkdir()
    text = b"\xef\xbb\xbf" + " two  <unk>\tgröße ’\r\n\n".encode() * 50
    for name, content in (("train", text), ("valid.txt", text), ("wiki.test.tokens.gz", gzip.compress(text))):
        (folder / name).write_bytes(content)
    corpus = corpora.corpus_in(folder)
    assert corpus.tokens["train"] == 50 * (4 + 1 + 1)
    corpus.write(tmp_path)
    for split in corpora.SPLITS:
        assert (tmp_path / f"{split}.txt").read_bytes() == "two <unk> größe ’\n\n".encode() * 50
    (folder / "valid.txt").unlink()
    for files, message in (
        ({}, "has no text for valid: it must hold one of valid, valid.txt, wiki.valid.tokens, "),
        ({"valid": text, "valid.txt": text}, "more than one text for valid: valid, valid.txt"),
        ({"valid.txt": b"\n \n"}, "valid.txt is empty"),
        ({"valid.txt": b"one two\n"}, "valid.txt holds 3 tokens; it must hold at least 100"),
        ({"valid.txt": text + "größer\n".encode("latin-1")}, "valid.txt, line 101: not UTF-8, byte 3 of the line"),
        *(({"valid.gz": x}, "valid.gz is no whole gzip file: ") for x in (gzip.compress(text)[:-10], text)),
    ):
        for name, content in files.items():
            (folder / name).write_bytes(content)
        assert run.main(["--data", str(folder), "--out", str(tmp_path / "out")]) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error and error.count("\n") == 1
        assert not (tmp_path / "out").exists()
        for name in files:
            (folder / name).unlink()


def test_a_row_of_a_table_has_its_numbers_in_their_columns() -> None:
    rows = [comparison.Row("b", 1_000, 9.0, 9.5, 8.25, 5_000.4), comparison.Row("c", 1_000, 9.0, 9.5)]
    numbers = scores.Row("b", 241_664, 1.2, 99.4, "nrefs:1", 992, 1_000, 12_345.6, 250.91)
    text = "\n".join([comparison.format_rows(rows), *scores.format_rows([numbers]).splitlines()[2:]])
    assert re.sub(" +", " ", text).splitlines()[2:] == [
        "| b | 1,000 | 9.00 | 9.50 | 8.25 | 5,000 |",
        "| c | 1,000 | 9.00 | 9.50 | - | - |",
        "| b | 241,664 | 99.40 | 992 of 1,000 | 12,346 | 251 |",
    ]


def test_the_unigram_model_knows_frequencies_only_and_the_window_moves_faster_over_a_long_text() -> None:
    unigram = comparison.Unigram(["a", "b"], ["a a b rare", "a"])
    # a 3, b 1, <unk> 1, </s> 2, each and one more, of 11
    assert math.isclose(unigram.perplexity(["b other a"]), (4 / 11 * 2 / 11 * 2 / 11 * 3 / 11) ** (-1 / 4))
    assert run.window_step(8_000) == 1 < run.window_step(100_000) < run.SEGMENT
    assert run.window_step(10_000_000) == run.SEGMENT // 2


@pytest.mark.slow
def test_the_demo_trains_scores_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a text of two words, of which a dictionary has fewer entries than a token is otherwise drawn from."""
    folder, out = tmp_path / "texts", tmp_path / "out"
    folder.mkdir()
    draw = random.Random(0)
    for split in corpora.SPLITS:
        (folder / f"{split}.txt").write_text("".join(" ".join(draw.choices("01", k=20)) + "\n" for _ in range(20)))
    arguments = ["--data", str(folder), "--out", str(out), "--updates", "2", "--models", "transformer", "delta-network"]

    # Interrupted where two models are being trained, and nothing goes on behind its back.
    interrupt(EXAMPLES / "demo" / "run.py", arguments, lambda lines: lines[-1].startswith("training the"))
    with steps.claim(out, run.MARK):  # a command that still ran would hold it
        pass
    assert not (out / "table.md").exists()

    assert run.main(arguments) == 0
    shown = capsys.readouterr().out
    programs = ("fairseq-train", "fairseq-eval-lm", "fairseq-interactive")
    assert all(text in shown for text in ("turning the text into numbers: done before", *programs))
    table = (out / "table.md").read_text()
    rows = [comparison.Row(**row) for row in json.loads((out / "results.json").read_text())["rows"]]
    assert [row.title for row in rows] == ["unigram", "Transformer", "Delta Network"]
    assert table in shown and table.startswith(comparison.format_rows(rows))
    for row in rows:
        numbers = [row.valid, row.sliding] + ([] if row.title == "Transformer" else [row.carried])
        assert all(math.isfinite(number) and number > 1 for number in numbers)
    assert table.partition("The Delta Network goes on after")[2].count("\n- ") == 3
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")

    assert run.main(arguments) == 0
    shown_again = capsys.readouterr().out
    assert "fairseq-" not in shown_again and table in shown_again


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
    assert len(set(numbers)) == len(numbers) and min(numbers) >= 1 and max(numbers) < 10**number_text.DIGITS
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


def test_pieces_put_together_are_the_text_and_translations_come_in_the_order_of_the_source(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(text := "ein und zwanzig\n\nzwanzig und drei\n")
    model, again = (str(tmp_path / f"{name}.model") for name in ("joint", "again"))
    for path in (model, again):
        assert pieces.main(["train", path, str(tmp_path / "text"), "--pieces", "20"]) == 0
    assert Path(model).read_bytes() == Path(again).read_bytes()
    assert pieces.main(["encode", model, str(tmp_path / "cut"), str(tmp_path / "text")]) == 0
    cut = (tmp_path / "cut" / "text").read_text(encoding="utf-8")
    assert len(set(cut.split())) > 3
    assert "\n".join(line.replace(" ", "").replace("▁", " ").strip() for line in cut.split("\n")) == text

    (tmp_path / "generated").write_text(GENERATED, encoding="utf-8")
    (tmp_path / "source").write_text("one million\ntwo\nzero\n", encoding="utf-8")
    assert translations.main([str(tmp_path / name) for name in ("generated", "source", "out")]) == 0
    assert (tmp_path / "out").read_text(encoding="utf-8") == "eine Million\nzwei\n\n"


@refused("""
number_text out --test 0 -> --test is 0; it must be at least 1
number_text out --train 999999 -> are 1,001,499 together; they must be 1,000,000 at most
number_text texts -> test.de is there already
pieces train new.model latin-1 -> latin-1 is not UTF-8 text: .* at byte 0
pieces train new.model good --pieces 100000 -> Vocabulary size too high
pieces train good good -> good is there already
pieces encode missing out good -> there is no model missing
pieces encode two . good -> good is there already
pieces encode two out good texts/good -> two files have the same name
translations generated four out -> 1 of 4 lines have no translation, line 4 the first of them
translations generated two out -> there are 3 translations of 2 lines
translations twice good out -> line 2 has two translations; generate with --nbest 1
translations generated good texts/test.de -> test.de is there already
""")
def test_what_the_scripts_cannot_use_is_named_and_nothing_written(env, words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    files = {"good": "one\ntwo\nthree\n", "texts/good": "one\n", "texts/test.de": "years of work", "two": "one\ntwo\n"}
    files |= {"four": "one\n" * 4, "generated": GENERATED, "twice": f"{GENERATED}D-1\t-0.5\tdrei\n", "latin-1": "ö\n"}
    for name, content in files.items():
        Path(name).write_text(content, encoding="latin-1")
    assert import_module(f"demo_translation.{words[0]}").main(words[1:]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"{words[0]}.py: ") and error.count("\n") == 1 and re.search(message, error)
    assert {str(x): x.read_text(encoding="latin-1") for x in Path().rglob("*") if x.is_file()} == files


def test_a_wrong_translation_is_shown_if_there_is_one() -> None:
    source, reference = ([f"{side}{i}" for i in range(8)] for side in "sr")
    for wrong, expected in (
        ({}, ["- s2 - reference: r2 - A: r2 - B: r2", "", "No translation is wrong."]),
        ({"B": [2]}, ["- s2 - reference: r2 - A: r2 - B, wrong: ?"]),
        ({"A": [4], "B": [3]}, ["", "One that the A gets wrong:", "", "- s4 - reference: r4 - A, wrong: ? - B: r4"]),
    ):
        outputs = {title: ["?" if i in wrong.get(title, []) else f"r{i}" for i in range(8)] for title in "AB"}
        lines = scores.format_examples(source, reference, outputs).replace("\n  -", " -").splitlines()
        assert lines[:3] == ["The first of the test text:", "", "- s0 - reference: r0 - A: r0 - B: r0"]
        assert lines[-len(expected) :] == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # fairseq's own
def test_numbers_that_were_never_seen_are_translated(tmp_path: Path, capsys, fairseq) -> None:
    """What `make demo-translation` does in a third of the updates, without the softmax Transformer beside it."""
    out = tmp_path / "out"
    arguments = ["--out", str(out), "--models", "linear-transformer", "--updates", "450"]
    assert translation.main(arguments) == 0
    shown = capsys.readouterr().out
    assert all(x in shown for x in ("fairseq-train", "fairseq-generate", "translations.py", "sacrebleu"))
    table = (out / "table.md").read_text(encoding="utf-8")
    [row] = [scores.Row(**row) for row in json.loads((out / "results.json").read_text())["rows"]]
    assert table in shown and table.startswith(scores.format_rows([row])) and row.signature in table
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

    assert translation.main(arguments) == 0
    shown_again = capsys.readouterr().out
    assert "fairseq-" not in shown_again and table in shown_again

    # The Transformer beside it differs in attention alone, which has the same projections.
    options = translation._parse(["--out", str(out), "--updates", "1"])
    other = translation.TranslationDemo(options, translation.MODELS, 0)
    step = other.train("transformer", other.binarize(other.encode(text := other.make_text(), other.learn_pieces(text))))
    log = fairseq([*step.command, "--save-dir", str(tmp_path / "transformer")])
    [counted] = re.findall(r"num\. shared model params: ([\d,]+)", log)
    copies = scores.count_copies(tmp_path / "transformer" / "checkpoint_best.pt")
    assert int(counted.replace(",", "")) - copies == row.parameters
