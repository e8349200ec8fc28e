"""The demo: what it learns from, what it does twice and what not, and that it comes to its end."""

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

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

sys.path.insert(0, str(EXAMPLES))  # as when run.py is started
comparison, corpora, fairseq_logs, run, steps = map(
    import_module, ("demo.comparison", "demo.corpora", "demo.fairseq_logs", "demo.run", "common.steps")
)

TEXT = "a text of more words than there must be , again and again\n" * 20


# --- English from Python


@pytest.fixture(scope="module")
def english() -> dict[str, list[str]]:
    return corpora.split_english()


def test_the_three_splits_hold_all_articles_and_share_none(english: dict[str, list[str]]) -> None:
    titles = {article.strip().split("\n")[0] for article in corpora.topics.values()}
    for title in map(corpora.tokenize, titles):
        assert any(title in lines for lines in english.values()), title
    # Headings and the like may coincide, sentences may not.
    sentences = {split: {line for line in lines if len(line.split()) >= 16} for split, lines in english.items()}
    assert not sentences["train"] & sentences["test"]
    assert not sentences["train"] & sentences["valid"]
    assert not sentences["valid"] & sentences["test"]


def test_a_tenth_of_the_english_is_held_out_twice(english: dict[str, list[str]]) -> None:
    tokens = {split: sum(len(line.split()) + 1 for line in lines) for split, lines in english.items()}
    assert sum(tokens.values()) > 60_000
    for split in ("valid", "test"):
        assert 0.08 < tokens[split] / sum(tokens.values()) <= 0.1


def test_the_english_is_the_same_every_time(english: dict[str, list[str]]) -> None:
    names = list(corpora.topics)
    random.Random(0).shuffle(names)
    assert corpora.split_english({name: corpora.topics[name] for name in names}) == english
    assert corpora.english_corpus().digest == corpora.english_corpus().digest


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


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ('The "assert" statement.', 'The " assert " statement .'),
        ("don't, object.__new__(cls[, ...])", "don't , object . __new__ ( cls [ , ... ] )"),
        ("  ", ""),
    ],
)
def test_words_and_punctuation_marks_are_tokens(text: str, tokens: str) -> None:
    assert corpora.tokenize(text) == tokens


def test_wrapped_lines_are_put_together_and_others_are_not() -> None:
    article = (
        "Title\n*****\n\n"
        "These lines end where they do because the next word was too long for\n"
        "them.  Not so the next ones:\n\n"
        "   if x:\n       y\n   z = 1\n"
    )
    splits = corpora.split_english({"article": article})
    assert splits["train"] == [
        "Title",
        "These lines end where they do because the next word was too long for them . Not so the next ones :",
        "if x :",
        "y",
        "z = 1",
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


@pytest.mark.parametrize("name", ["train", "train.txt", "wiki.train.tokens", "train.gz", "wiki.train.tokens.gz"])
def test_texts_are_found_by_their_usual_names(folder: Path, name: str) -> None:
    (folder / "train.txt").unlink()
    text = b" two  <unk>\twords\r\n\n" * 50
    (folder / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    corpus = corpora.corpus_in(folder)
    assert list(corpus.lines("train")) == ["two <unk> words", ""] * 50
    assert corpus.tokens["train"] == 50 * (3 + 1 + 1)


def test_text_is_written_as_it_was_read(folder: Path, tmp_path: Path) -> None:
    (folder / "train.txt").write_bytes(b"\xef\xbb\xbf" + "größer ’\n".encode() * 50)
    corpora.corpus_in(folder).write(tmp_path)
    assert (tmp_path / "train.txt").read_bytes() == "größer ’\n".encode() * 50
    assert (tmp_path / "test.txt").read_text() == TEXT


def corrupt(folder: Path, change: str) -> None:
    file = folder / "valid.txt"
    match change:
        case "no folder":
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
        case "missing":
            file.unlink()
        case "twice":
            (folder / "valid").write_text(TEXT)
        case "empty":
            file.write_text("")
        case "blank":
            file.write_text("\n \n")
        case "short":
            file.write_text("one two\n")
        case "latin-1":
            file.write_bytes(TEXT.encode() + "größer\n".encode("latin-1"))
        case "cut":
            (folder / "valid.gz").write_bytes(gzip.compress(TEXT.encode())[:-10])
            file.unlink()
        case "no gzip":
            file.rename(folder / "valid.gz")
        case "unreadable":
            file.unlink()
            file.symlink_to(folder / "missing")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("no folder", r"texts is not a folder"),
        ("missing", r"texts has no text for valid: it must hold one of valid, valid\.txt, wiki\.valid\.tokens, "),
        ("twice", r"more than one text for valid: valid, valid\.txt"),
        ("empty", r"valid\.txt is empty"),
        ("blank", r"valid\.txt is empty"),
        ("short", r"valid\.txt holds 3 tokens; it must hold at least 100"),
        ("latin-1", r"valid\.txt is not UTF-8 text \(after line \d+\)"),
        ("cut", r"valid\.gz is no whole gzip file: "),
        ("no gzip", r"valid\.gz is no whole gzip file: "),
        ("unreadable", r"no text for valid"),
    ],
)
def test_texts_that_cannot_be_used_are_named_and_nothing_is_written(
    folder: Path, tmp_path: Path, change: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    corrupt(folder, change)
    out = tmp_path / "out"
    assert run.main(["--data", str(folder), "--out", str(out)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    with pytest.raises(corpora.CorpusError, match=message):
        corpora.corpus_in(folder)
    assert not out.exists()


@pytest.mark.parametrize("arguments", [["--updates", "0"], ["--updates", "x"], ["--seed", "-1"], ["--models", "lstm"]])
def test_options_that_make_no_sense_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.main(arguments)
    assert arguments[0] in capsys.readouterr().err


# --- the folder of the results


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert run.main(["--out", str(tmp_path)]) == 1
    assert "holds other files" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_is_no_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--out", str(folder / "test.txt")]) == 1
    assert "test.txt for the results" in capsys.readouterr().err
    assert (folder / "test.txt").read_text() == TEXT


# --- logs, table


@pytest.mark.parametrize("read", ["read_perplexity", "read_continuations"])
def test_a_log_without_results_is_noticed(read: str) -> None:
    with pytest.raises(ValueError, match="its log has no"):
        getattr(fairseq_logs, read)("Traceback (most recent call last):\n")


def test_the_unigram_model_knows_frequencies_only() -> None:
    unigram = comparison.Unigram(["a", "b"], ["a a b rare", "a"])
    # a 3, b 1, <unk> 1, </s> 2, each and one more, of 11
    expected = (4 / 11 * 2 / 11 * 2 / 11 * 3 / 11) ** (-1 / 4)
    assert math.isclose(unigram.perplexity(["b other a"]), expected)


def test_the_table_is_markdown_and_aligned() -> None:
    rows = [comparison.Row("unigram", 10, 200.123, 201.0), comparison.Row("b", 1_000, 9.0, 9.5, 8.25, 5_000.4)]
    lines = comparison.format_rows(rows).splitlines()
    assert len(lines) == 4 and len(set(map(len, lines))) == 1
    assert [cell.strip() for cell in lines[3].strip("|").split("|")] == ["b", "1,000", "9.00", "9.50", "8.25", "5,000"]


def test_the_window_moves_by_more_than_one_token_over_a_long_text() -> None:
    assert run.window_step(8_000) == 1
    assert 1 < run.window_step(100_000) < run.SEGMENT
    assert run.window_step(10_000_000) == run.SEGMENT // 2


def test_a_prompt_is_known_to_the_models(folder: Path) -> None:
    (folder / "test.txt").write_text("too short\n" + TEXT.replace("more", "unheard-of") + TEXT)
    corpus = corpora.corpus_in(folder)
    assert run.choose_prompt(corpus, sorted(set(TEXT.split()))) == "a text of more words than"
    assert run.choose_prompt(corpus, ["other"]) == "other"


@pytest.mark.parametrize("words", [0, 2, 4, 5, 9, 500])
def test_a_token_is_drawn_from_no_more_than_there_are(folder: Path, tmp_path: Path, words: int) -> None:
    from fairseq.data import Dictionary

    out = tmp_path / "out"
    work = run.Demo(run._parse(["--out", str(out)]), corpora.corpus_in(folder), 0)
    binarized = work.binarize()
    dictionary = Dictionary()
    for i in range(words):
        dictionary.add_symbol(f"w{i}", n=2)
    dictionary.finalize()  # as fairseq-preprocess does, which makes their number a multiple of 8
    binarized.folder.mkdir(parents=True)
    dictionary.save(str(binarized.folder / "dict.txt"))
    sampled = work.sample("delta-network", "w0", binarized, work.train("delta-network", False, binarized))
    drawn_from = int(sampled.command[sampled.command.index("--sampling-topk") + 1])
    assert drawn_from == min(10, len(dictionary)) and len(dictionary) % 8 == 0


# --- all of it


def demo(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", str(EXAMPLES / "demo" / "run.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT.parent,  # it works from anywhere
    )


@pytest.mark.slow
def test_the_demo_trains_scores_and_compares(tmp_path: Path) -> None:
    folder, out = tmp_path / "texts", tmp_path / "out"
    folder.mkdir()
    for split, lines in corpora.split_english().items():
        (folder / f"{split}.txt").write_text("\n".join(lines[:15]) + "\n")
    arguments = ["--data", str(folder), "--out", str(out), "--updates", "4"]

    # Interrupted where two models are being trained, and nothing goes on behind its back.
    interrupted = demo(*arguments)
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

    second = demo(*arguments)
    shown, error = second.communicate(timeout=600)
    assert second.returncode == 0, error
    assert "turning the text into numbers: done before" in shown
    for command in ("fairseq-train", "fairseq-eval-lm", "fairseq-interactive"):
        assert command in shown
    table = (out / "table.md").read_text()
    assert table in shown
    for model in run.MODELS.values():
        assert f"| {model.title} " in table
    for row in json.loads((out / "results.json").read_text())["rows"]:
        numbers = [value for name, value in row.items() if name not in ("title", "tokens_per_second")]
        assert row["title"] == "Transformer" or None not in numbers
        assert all(math.isfinite(value) and value > 1 for value in numbers if value is not None)
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert str(out / "table.md") in shown and str(out / "curves.png") in shown

    third = demo(*arguments)
    shown_again, _ = third.communicate(timeout=60)
    assert third.returncode == 0
    assert "fairseq-" not in shown_again and table in shown_again


@pytest.mark.slow
def test_the_demo_takes_a_text_of_two_words(tmp_path: Path) -> None:
    folder, out = tmp_path / "texts", tmp_path / "out"
    folder.mkdir()
    draw = random.Random(0)
    for split in corpora.SPLITS:
        (folder / f"{split}.txt").write_text("".join(" ".join(draw.choices("01", k=20)) + "\n" for _ in range(20)))
    process = demo("--data", str(folder), "--out", str(out), "--updates", "1", "--models", "delta-network")
    _, error = process.communicate(timeout=600)
    assert process.returncode == 0, error
    table = (out / "table.md").read_text()
    assert table.partition("The Delta Network goes on after")[2].count("\n- ") == 3


# --- make


def words_of_make_demo(*arguments: str, **variables: str) -> list[str]:
    """The words of the command that `make demo` gives the shell."""
    others = {name: value for name, value in os.environ.items() if name not in ("DATA", "MAKEFLAGS", "MFLAGS")}
    command = ["make", "--no-print-directory", "-n", "demo", *arguments]
    listed = subprocess.run(
        command, cwd=ROOT, env={**others, **variables}, capture_output=True, text=True, check=True
    ).stdout
    return shlex.split(listed.splitlines()[-1])


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make on the PATH")
@pytest.mark.parametrize("name", ["texts", "it's", "two words", "$HOME", "a$b", '"quoted"', "back\\slash", "a,b;c&d"])
def test_make_hands_on_a_folder_of_any_name(name: str) -> None:
    expected = [".venv/bin/python", "examples/demo/run.py", "--data", f"/tmp/{name}"]
    assert words_of_make_demo(f"DATA=/tmp/{name}") == words_of_make_demo(DATA=f"/tmp/{name}") == expected


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make on the PATH")
def test_make_hands_on_no_folder_where_none_was_named() -> None:
    assert words_of_make_demo() == words_of_make_demo("DATA=") == [".venv/bin/python", "examples/demo/run.py"]
