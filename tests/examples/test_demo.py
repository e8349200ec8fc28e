"""The demo of language models: what it learns from, and that it comes to its end."""

from __future__ import annotations

import gzip
import json
import math
import random
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from .conftest import EXAMPLES, ROOT

comparison, corpora, run, steps = map(import_module, ("demo.comparison", "demo.corpora", "demo.run", "common.steps"))

TEXT = "a text of more words than there must be , again and again\n" * 20


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
    for split in ("valid", "test"):
        assert 0.08 < tokens[split] / sum(tokens.values()) <= 0.1

    names = list(corpora.topics)
    random.Random(0).shuffle(names)
    assert corpora.split_english({name: corpora.topics[name] for name in names}) == english


def test_articles_with_a_common_paragraph_stay_together_and_repeat_nothing() -> None:
    def paragraph(name: str) -> str:
        return " ".join(f"{name}{i}" for i in range(20))

    articles = {name: f"Title {name}\n\n{paragraph(name)}" for name in "abcdefghijklmnopqrstuvwxyz"}
    articles["a"] += f"\n\n{paragraph('b')}\n\n{paragraph('c')}"
    splits = corpora.split_english(articles)
    lines = [line for split in splits.values() for line in split]
    assert lines.count(paragraph("b")) == lines.count(paragraph("c")) == 1
    [home] = [split for split, texts in splits.items() if paragraph("a") in texts]
    assert {paragraph("b"), paragraph("c"), "Title b", "Title c"} <= set(splits[home])


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
        "if x :",
        "y",
        "z = [ 1 , ... ]",
    ]


# --- a user's text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Train, valid and test text."""
    path = tmp_path / "texts"
    path.mkdir()
    for split in corpora.SPLITS:
        (path / f"{split}.txt").write_text(TEXT)
    return path


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


def test_the_unigram_model_knows_frequencies_only() -> None:
    unigram = comparison.Unigram(["a", "b"], ["a a b rare", "a"])
    # a 3, b 1, <unk> 1, </s> 2, each and one more, of 11
    expected = (4 / 11 * 2 / 11 * 2 / 11 * 3 / 11) ** (-1 / 4)
    assert math.isclose(unigram.perplexity(["b other a"]), expected)


def test_the_window_moves_by_more_than_one_token_over_a_long_text() -> None:
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
    interrupted = subprocess.Popen(
        [sys.executable, "-u", str(EXAMPLES / "demo" / "run.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT.parent,  # it works from anywhere
    )
    assert interrupted.stdout is not None
    for line in interrupted.stdout:
        if line.startswith("training the"):
            break
    interrupted.send_signal(signal.SIGTERM)
    _, error = interrupted.communicate(timeout=30)
    assert interrupted.returncode == 130 and "goes on from here" in error
    with steps.claim(out, run.MARK):  # a command that still ran would hold it
        pass
    assert not (out / "table.md").exists()

    assert run.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "turning the text into numbers: done before" in shown
    for command in ("fairseq-train", "fairseq-eval-lm", "fairseq-interactive"):
        assert command in shown
    table = (out / "table.md").read_text()
    assert table in shown
    rows = [comparison.Row(**row) for row in json.loads((out / "results.json").read_text())["rows"]]
    assert [row.title for row in rows] == ["unigram", "Transformer", "Delta Network"]
    assert table.startswith(comparison.format_rows(rows))
    for row in rows:
        numbers = [row.valid, row.sliding] + ([] if row.title == "Transformer" else [row.carried])
        assert all(math.isfinite(number) and number > 1 for number in numbers)
    assert table.partition("The Delta Network goes on after")[2].count("\n- ") == 3
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")

    assert run.main(arguments) == 0
    shown_again = capsys.readouterr().out
    assert "fairseq-" not in shown_again and table in shown_again
