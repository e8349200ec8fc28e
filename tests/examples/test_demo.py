"""The demo: what it learns from, what it does twice and what not, and that it comes to its end."""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo"

sys.path.append(str(DEMO))  # as when run.py is started
comparison, corpora, fairseq_logs, run, steps = map(
    import_module, ("comparison", "corpora", "fairseq_logs", "run", "steps")
)

TEXT = "a text of more words than there must be , again and again\n" * 20
TRAIN_LOG = """
2026-01-01 | INFO | fairseq_cli.train | num. shared model params: 1,234 (num. trained: 1,234)
2026-01-01 | INFO | train_inner | {"epoch": 1, "loss": "3", "ppl": "8", "wps": "100", "ups": "2", "num_updates": "2"}
2026-01-01 | INFO | valid | {"epoch": 1, "valid_loss": "4", "valid_ppl": "16", "valid_num_updates": "2"}
2026-01-01 | INFO | train_inner | {"epoch": 1, "loss": "2", "ppl": "4", "wps": "300", "ups": "2", "num_updates": "4"}
2026-01-01 | INFO | valid | {"epoch": 1, "valid_loss": "5", "valid_ppl": "32", "valid_num_updates": "4"}
"""


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


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with steps.claim(out), pytest.raises(steps.StepError, match="another demo is at work"), steps.claim(out):
        pass
    with steps.claim(out):
        pass


# --- steps


def make_step(folder: Path, code: str, **others: Any) -> Any:
    """A step that runs Python code in its folder, given as argument."""
    settings = {"read_result": lambda log: {"log": log}, **others}
    return steps.Step(folder.name, folder, [sys.executable, "-c", code, str(folder)], **settings)


def work(*wanted: Any, slots: int = 2) -> str:
    """Runs steps; returns what was shown."""
    output = io.StringIO()
    steps.Runner(ROOT, slots, output, {}).run(wanted)
    return output.getvalue()


def test_a_finished_step_is_not_run_again(tmp_path: Path) -> None:
    step = make_step(tmp_path / "a", "print('hello')")
    assert step.result() is None
    work(step)
    assert step.finished_result() == {"log": "hello\n"}
    (step.folder / "witness").touch()
    assert "done before" in work(step)
    assert (step.folder / "witness").exists()


@pytest.mark.parametrize("change", ["command", "input", "earlier step"])
def test_a_changed_step_is_done_anew(tmp_path: Path, change: str) -> None:
    def make(code: str, digest: str, earlier: str) -> Any:
        first = make_step(tmp_path / "first", earlier)
        return first, make_step(tmp_path / "second", code, depends_on=digest, after=[first])

    work(*make("print(1)", "1", "print(0)"))
    (tmp_path / "second" / "witness").touch()
    first, second = make(
        "print(2)" if change == "command" else "print(1)",
        "2" if change == "input" else "1",
        "print(2)" if change == "earlier step" else "print(0)",
    )
    assert second.result() is None
    work(first, second)
    assert second.result() is not None
    assert not (tmp_path / "second" / "witness").exists()


def test_steps_wait_for_those_that_they_use(tmp_path: Path) -> None:
    first = make_step(tmp_path / "first", "import time; time.sleep(0.5)")
    second = make_step(
        tmp_path / "second",
        "import sys, pathlib; assert (pathlib.Path(sys.argv[1]).parent / 'first' / 'done.json').exists()",
        after=[first],
    )
    work(second, first)
    assert second.result() is not None


@pytest.mark.parametrize(
    ("code", "settings", "reason"),
    [
        ("import sys; print('what went wrong'); sys.exit(3)", {}, "exit status 3"),
        ("import os; print('what went wrong', flush=True); os.abort()", {}, "signal 6"),
        ("print('what went wrong')", {"read_result": fairseq_logs.read_perplexity}, "no perplexity"),
    ],
)
def test_a_failed_step_is_shown_and_not_marked_as_done(
    tmp_path: Path, code: str, settings: dict[str, Any], reason: str
) -> None:
    step = make_step(tmp_path / "a", code, **settings)
    with pytest.raises(steps.StepError, match=rf"a failed: .*{reason}.*\n.*what went wrong\n.*log\.txt"):
        work(step)
    assert step.result() is None


def test_a_failure_ends_the_steps_beside_it(tmp_path: Path) -> None:
    slow = make_step(tmp_path / "slow", "import os, time; print(os.getpid(), flush=True); time.sleep(60)", resumes=True)
    failing = make_step(
        tmp_path / "failing",
        "import sys, pathlib, time\n"
        "log = pathlib.Path(sys.argv[1]).parent / 'slow' / 'log.txt'\n"
        "while not log.read_text(): time.sleep(0.01)\n"
        "sys.exit(1)",
    )
    started = time.monotonic()
    with pytest.raises(steps.StepError, match="failing failed"):
        work(slow, failing)
    assert time.monotonic() - started < 30
    with pytest.raises(ProcessLookupError):
        os.kill(int(slow.log.read_text()), 0)
    assert slow.result() is None


def test_what_a_step_started_ends_with_it(tmp_path: Path) -> None:
    """As a loader's workers do, which keep the folder claimed while they live and notice their parent's end late."""
    out = tmp_path / "out"
    with pytest.raises(steps.StepError, match="failing failed"), steps.claim(out) as claimed:
        worker = (
            "import signal, time\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "print('up', flush=True)\n"
            "time.sleep(60)"
        )
        slow = make_step(
            out / "slow",
            f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}], close_fds=False)",
        )
        failing = make_step(
            out / "failing",
            "import sys, pathlib, time\n"
            "log = pathlib.Path(sys.argv[1]).parent / 'slow' / 'log.txt'\n"
            "while not log.read_text(): time.sleep(0.01)\n"
            "sys.exit(1)",
        )
        steps.Runner(ROOT, 2, io.StringIO(), {}, keep_open=[claimed]).run([slow, failing])
    with steps.claim(out):
        pass


HALF_THEN_WHOLE = """
import pathlib, sys, zipfile
checkpoint = pathlib.Path(sys.argv[1]) / "checkpoint_last.pt"
print("resumed" if checkpoint.exists() else "began")
begun = checkpoint.exists()
zipfile.ZipFile(checkpoint, "w").writestr("updates", "1")
sys.exit(0 if begun else 1)
"""


@pytest.mark.parametrize("case", ["resumes", "begins anew", "broken checkpoint", "changed"])
def test_an_interrupted_step_goes_on_if_it_can(tmp_path: Path, case: str) -> None:
    step = make_step(tmp_path / "a", HALF_THEN_WHOLE, resumes=case != "begins anew")
    with pytest.raises(steps.StepError):
        work(step)
    assert step.log.read_text() == "began\n"
    if case == "broken checkpoint":
        checkpoint = step.folder / "checkpoint_last.pt"
        checkpoint.write_bytes(checkpoint.read_bytes()[:-10])
    if case == "changed":
        step = make_step(tmp_path / "a", HALF_THEN_WHOLE, resumes=True, depends_on="something else")
    if case == "resumes":
        assert "a: goes on where it was\n" in work(step)
        assert step.log.read_text() == "began\nresumed\n"
    else:
        with pytest.raises(steps.StepError):
            work(step)
        assert step.log.read_text() == "began\n"


def test_commands_are_shown_as_they_can_be_typed(tmp_path: Path) -> None:
    flags = [f"--flag-{i}={i}" for i in range(20)]
    script = "import sys; print(*sys.argv[1:], sep='|')"
    step = steps.Step("a", tmp_path, [sys.executable, "-c", script, "it's", "--b", "(1, 2)", *flags], lambda log: {})
    shown = step.shell_command({"A": "b c"})
    assert max(map(len, shown.splitlines())) <= 110 and shown.count("\n") > 2
    typed = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True).stdout
    assert typed.strip().split("|") == ["it's", "--b", "(1, 2)", *flags]


# --- logs, table


def test_the_log_of_a_training_that_was_resumed_counts_each_update_once() -> None:
    result = fairseq_logs.read_training(TRAIN_LOG + TRAIN_LOG.replace('"ppl": "4"', '"ppl": "5"'))
    assert result["parameters"] == 1234
    assert result["train_ppl"] == [(2, 8.0), (4, 5.0)]
    assert result["valid_ppl"] == [(2, 16.0), (4, 32.0)]
    assert result["best_valid_ppl"] == 16.0
    assert result["tokens_per_second"] == 200.0


def test_progress_is_read_from_a_log_that_is_being_written() -> None:
    assert fairseq_logs.describe_training("", 8) == "starting"
    cut = TRAIN_LOG + '2026-01-01 | INFO | train_inner | {"epoch": 1, "lo'
    assert fairseq_logs.describe_training(cut, 8) == "update 4/8, loss 2.00, 300 tokens/s, 2 s left"


@pytest.mark.parametrize("read", ["read_training", "read_perplexity", "read_continuations"])
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
    lines = comparison.format_table(rows).splitlines()
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


# --- all of it


def demo(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", str(DEMO / "run.py"), *arguments],
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
    with steps.claim(out):  # a command that still ran would hold it
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
