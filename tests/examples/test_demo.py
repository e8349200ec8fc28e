"""The demo of language models, what it does as the others do, and how `make` starts them."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from .conftest import EXAMPLES, ROOT

comparison, corpora, run, steps = map(import_module, ("demo.comparison", "demo.corpora", "demo.run", "common.steps"))
translation, grid, synthetic = map(import_module, ("demo_translation.run", "synthetic.run", "synthetic.demo"))

TEXT = "a text of more words than there must be , again and again\n" * 20

# --- what the demos do alike

BOTH = pytest.mark.parametrize("demo", [run, translation])


@BOTH
@pytest.mark.parametrize("arguments", ["--updates 0", "--updates x", "--seed -1", "--models lstm"])
def test_options_that_make_no_sense_are_refused(demo: Any, arguments: str, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main([*arguments.split(), "--out", str(tmp_path / "out")])
    assert arguments.split()[0] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("demo", [run, translation, grid, synthetic])
def test_a_folder_with_other_files_is_left_alone(demo: Any, tmp_path: Path, capsys) -> None:
    (tmp_path / "made-by-another-demo").write_text("years of work")
    assert demo.main([*(["--setting", "1"] if demo is grid else []), "--out", str(tmp_path)]) == 1
    assert "holds other files" in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["years of work"]


@BOTH
def test_a_missing_package_is_named_before_any_work(demo: Any, tmp_path: Path, monkeypatch, capsys) -> None:
    find_spec = "common.commands.find_spec"
    monkeypatch.setattr(find_spec, lambda name: None if name == "matplotlib" else name)
    assert demo.main(["--out", str(tmp_path / "out")]) == 1
    assert "there is no package matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("module", "row", "cells"),
    [
        ("demo", ("b", 1_000, 9.0, 9.5, 8.25, 5_000.4), "b | 1,000 | 9.00 | 9.50 | 8.25 | 5,000"),
        ("demo", ("b", 1_000, 9.0, 9.5), "b | 1,000 | 9.00 | 9.50 | - | -"),
        (
            "demo_translation",
            ("b", 241_664, 1.2, 99.4, "nrefs:1", 992, 1_000, 12_345.6, 250.91),
            "b | 241,664 | 99.40 | 992 of 1,000 | 12,346 | 251",
        ),
    ],
)
def test_a_row_of_the_table_has_its_numbers_in_their_columns(module: str, row: tuple[Any, ...], cells: str) -> None:
    rows = import_module(f"{module}.comparison")
    line = rows.format_rows([rows.Row(*row)]).splitlines()[2]
    assert " | ".join(cell.strip() for cell in line.strip("|").split("|")) == cells


def words_of_make(*arguments: str, **variables: str) -> list[str]:
    """The words of the command that `make` gives the shell, as from a shell, though make may have started the tests."""
    env = {name: value for name, value in os.environ.items() if name not in ("DATA", "MAKEFLAGS", "MFLAGS")}
    make = ["make", "--no-print-directory", "-n", *arguments]
    shown = subprocess.run(make, cwd=ROOT, env={**env, **variables}, capture_output=True, text=True, check=True).stdout
    return shlex.split(shown.splitlines()[-1])


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make on the PATH")
def test_make_starts_the_demos_with_a_folder_of_any_name() -> None:
    start = [".venv/bin/python", "examples/demo/run.py"]
    assert words_of_make("demo") == words_of_make("demo", "DATA=") == start
    for name in ("it's", "two words", "$HOME a$b", '"quoted"', "back\\slash", "a,b;c&d"):
        expected = [*start, "--data", f"/tmp/{name}"]
        assert words_of_make("demo", f"DATA=/tmp/{name}") == words_of_make("demo", DATA=f"/tmp/{name}") == expected
    assert words_of_make("demo-translation") == [start[0], "examples/demo_translation/run.py"]
    assert words_of_make("demo-synthetic") == [start[0], "examples/synthetic/demo.py"]


# --- English from Python


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
    article = (
        "Title\n*****\n\n"
        "These lines end where they don't because the next word was too long\n"
        'for "them".  Not so the next ones:\n\n'
        "   if x:\n       y\n   z = [1, ...]\n"
    )
    assert corpora.split_english({"article": article})["train"] == [
        "Title",
        'These lines end where they don\'t because the next word was too long for " them " . Not so the next ones :',
        *("if x :", "y", "z = [ 1 , ... ]"),
    ]


# --- a user's text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Train, valid and test text."""
    (tmp_path / "texts").mkdir()
    for split in corpora.SPLITS:
        (tmp_path / "texts" / f"{split}.txt").write_text(TEXT)
    return tmp_path / "texts"


@pytest.mark.parametrize("name", ["train", "train.txt", "wiki.train.tokens.gz"])
def test_texts_are_found_by_their_usual_names_and_written_as_read(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / "train.txt").unlink()
    text = b"\xef\xbb\xbf" + " two  <unk>\tgröße ’\r\n\n".encode() * 50
    (folder / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    corpus = corpora.corpus_in(folder)
    assert corpus.tokens["train"] == 50 * (4 + 1 + 1)
    corpus.write(tmp_path)
    assert (tmp_path / "train.txt").read_bytes() == "two <unk> größe ’\n\n".encode() * 50
    assert (tmp_path / "test.txt").read_text() == TEXT


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no text for valid: it must hold one of valid, valid.txt, wiki.valid.tokens, "),
        ({"valid": TEXT.encode(), "valid.txt": TEXT.encode()}, "more than one text for valid: valid, valid.txt"),
        ({"valid.txt": b"\n \n"}, "valid.txt is empty"),
        ({"valid.txt": b"one two\n"}, "valid.txt holds 3 tokens; it must hold at least 100"),
        ({"valid.txt": TEXT.encode() + "größer\n".encode("latin-1")}, "valid.txt is not UTF-8 text (after line "),
        ({"valid.gz": gzip.compress(TEXT.encode())[:-10]}, "valid.gz is no whole gzip file: "),
        ({"valid.gz": TEXT.encode()}, "valid.gz is no whole gzip file: "),
    ],
)
def test_texts_that_cannot_be_used_are_named_and_nothing_is_written(
    folder: Path, tmp_path: Path, files: dict[str, bytes], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "valid.txt").unlink()
    for name, text in files.items():
        (folder / name).write_bytes(text)
    assert run.main(["--data", str(folder), "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


# --- what it computes


def test_the_unigram_model_knows_frequencies_only_and_the_window_moves_faster_over_a_long_text() -> None:
    unigram = comparison.Unigram(["a", "b"], ["a a b rare", "a"])
    # a 3, b 1, <unk> 1, </s> 2, each and one more, of 11
    expected = (4 / 11 * 2 / 11 * 2 / 11 * 3 / 11) ** (-1 / 4)
    assert math.isclose(unigram.perplexity(["b other a"]), expected)
    assert run.window_step(8_000) == 1
    assert 1 < run.window_step(100_000) < run.SEGMENT
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
    words = [sys.executable, "-u", str(EXAMPLES / "demo" / "run.py"), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    interrupted = subprocess.Popen(words, cwd=ROOT.parent, **pipes)  # it works from anywhere
    assert interrupted.stdout is not None
    next(line for line in interrupted.stdout if line.startswith("training the"))
    interrupted.send_signal(signal.SIGTERM)
    _, error = interrupted.communicate(timeout=300)
    assert interrupted.returncode == 130 and "goes on from here" in error
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
