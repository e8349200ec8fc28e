"""The demo of translation: its text, its scripts, what it shows, and that it translates."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
RUN = EXAMPLES / "demo_translation" / "run.py"

sys.path.insert(0, str(EXAMPLES))  # as when run.py is started
comparison, number_text, pieces, run, translations = (
    import_module(f"demo_translation.{name}") for name in ("comparison", "number_text", "pieces", "run", "translations")
)
steps = import_module("common.steps")

SMALL = {"train": 300, "valid": 20, "test": 30}
GENERATED = """2026-01-01 12:00:00 | INFO | fairseq_cli.generate | loading model(s) from checkpoint_best.pt
S-1\ttwo
T-1\tzwei
H-1\t-0.1\tzwei
D-1\t-0.1\tzwei
P-1\t-0.1 -0.2
S-0\tone million
H-0\t-0.2\teine Million
D-0\t-0.2\teine Million
S-2\tzero
H-2\t-inf\t
D-2\t-inf\t
2026-01-01 | INFO | fairseq_cli | Translated 1,003 sentences (9,954 tokens) in 4.0s (250.91 sentences/s, 2.5 tokens/s)
"""


# --- the text


def write_small(folder: Path) -> Path:
    """Numbers in words, some for each split."""
    number_text.write_text(number_text.split_numbers(SMALL), folder)
    return folder


@pytest.mark.parametrize(
    ("number", "english", "german"),
    [
        (1, "one", "eins"),
        (21, "twenty-one", "einundzwanzig"),
        (342_007, "three hundred and forty-two thousand and seven", "dreihundertzweiundvierzigtausendsieben"),
        (1_000_016, "one million and sixteen", "eine Million sechzehn"),
        (
            2_001_000_030,
            "two billion, one million and thirty",
            "zwei Milliarden eine Million dreißig",
        ),
    ],
)
def test_a_number_is_in_the_same_line_of_both_languages(tmp_path: Path, number: int, english: str, german: str) -> None:
    number_text.write_text({"test": [7, number]}, tmp_path)
    assert (tmp_path / "test.en").read_text(encoding="utf-8") == f"seven\n{english}\n"
    assert (tmp_path / "test.de").read_text(encoding="utf-8") == f"sieben\n{german}\n"


def test_the_splits_have_their_sizes_and_share_no_number() -> None:
    splits = number_text.split_numbers(number_text.SIZES)
    assert {split: len(numbers) for split, numbers in splits.items()} == number_text.SIZES
    numbers = [number for split in splits.values() for number in split]
    assert len(set(numbers)) == len(numbers)
    assert min(numbers) >= 1 and max(numbers) < 10**number_text.DIGITS


def test_long_numbers_of_every_length_are_tested() -> None:
    test = number_text.split_numbers(number_text.SIZES)["test"]
    digits = [len(str(number)) for number in test]
    for length in range(4, number_text.DIGITS + 1):  # of shorter ones there are too few
        assert 60 < digits.count(length) < 160


def test_the_text_is_the_same_every_time() -> None:
    splits = number_text.split_numbers(SMALL)
    assert splits == number_text.split_numbers(SMALL)
    assert splits != number_text.split_numbers(SMALL, seed=2)
    assert splits["test"][:3] == [578, 8_548_059_994, 559_411]


def test_all_short_numbers_may_be_used_up() -> None:
    splits = number_text.split_numbers({"train": 30_000, "valid": 1, "test": 1})
    assert set(range(1, 10)) <= {number for numbers in splits.values() for number in numbers}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--test", "0"], "--test is 0; it must be at least 1"),
        (["--train", "999999"], "--train, --valid, --test are 1,001,499 together; they must be 1,000,000 at most"),
    ],
)
def test_amounts_that_make_no_sense_are_refused(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert number_text.main([str(tmp_path / "text"), *arguments]) == 1
    assert capsys.readouterr().err == f"number_text.py: {message}\n"
    assert not (tmp_path / "text").exists()


def test_no_text_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test.de").write_text("years of work")
    assert number_text.main([str(tmp_path)]) == 1
    assert "test.de is there already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["test.de"]


# --- pieces


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def model(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of pieces."""
    path = tmp_path_factory.mktemp("pieces") / "joint.model"
    assert pieces.main(["train", str(path), str(text / "train.en"), str(text / "train.de"), "--pieces", "100"]) == 0
    return path


def test_pieces_put_together_are_the_text(text: Path, model: Path, tmp_path: Path) -> None:
    names = ["test.en", "test.de"]
    assert pieces.main(["encode", str(model), str(tmp_path), *(str(text / name) for name in names)]) == 0
    for name in names:
        whole = (text / name).read_text(encoding="utf-8").splitlines()
        cut = (tmp_path / name).read_text(encoding="utf-8").splitlines()
        assert [line.replace(" ", "").replace("▁", " ").strip() for line in cut] == whole
        assert sum(map(len, map(str.split, cut))) > 1.5 * sum(map(len, map(str.split, whole)))
        assert len({piece for line in cut for piece in line.split()}) <= 100


def test_pieces_are_the_same_every_time(text: Path, model: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.model"
    pieces.train([text / "train.en", text / "train.de"], again, 100)
    assert again.read_bytes() == model.read_bytes()


def test_an_empty_line_stays_a_line(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.en").write_text("one\n\ntwo\n")
    pieces.encode(model, [tmp_path / "a.en"], tmp_path / "out")
    lines = (tmp_path / "out" / "a.en").read_text(encoding="utf-8").split("\n")
    assert [bool(line) for line in lines] == [True, False, True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "new.model", "latin-1"], r"latin-1 is not UTF-8 text: .* at byte 2"),
        (["train", "new.model", "missing"], r"No such file or directory: .*missing"),
        (["train", "new.model", "good", "--pieces", "100000"], r"Vocabulary size too high"),
        (["train", "good", "good"], r"good is there already"),
        (["encode", "missing", "out", "good"], r"there is no model .*missing"),
        (["encode", "good", "out", "good"], r"good"),
        (["encode", "MODEL", ".", "good"], r"good is there already"),
        (["encode", "MODEL", "out", "good", "other/good"], r"two files have the same name"),
    ],
)
def test_what_cannot_be_cut_is_named_and_nothing_is_written(
    model: Path, tmp_path: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("good").write_text("one\ntwo\nthree\n")
    Path("latin-1").write_bytes("größer\n".encode("latin-1"))
    result = subprocess.run(
        [sys.executable, RUN.parent / "pieces.py", *(str(model) if word == "MODEL" else word for word in arguments)],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("pieces.py: ")
    assert re.search(message, last)
    assert sorted(os.listdir()) == ["good", "latin-1"]
    assert Path("good").read_text() == "one\ntwo\nthree\n"


# --- translations, scores, table


def test_translations_come_in_the_order_of_the_source(tmp_path: Path) -> None:
    (tmp_path / "generated").write_text(GENERATED, encoding="utf-8")
    (tmp_path / "source").write_text("one million\ntwo\nzero\n", encoding="utf-8")
    assert translations.main([str(tmp_path / name) for name in ("generated", "source", "out")]) == 0
    assert (tmp_path / "out").read_text(encoding="utf-8") == "eine Million\nzwei\n\n"


@pytest.mark.parametrize(
    ("generated", "lines", "message"),
    [
        (GENERATED, 4, "1 of 4 lines have no translation, line 4 the first of them"),
        (GENERATED, 2, "there are 3 translations of 2 lines"),
        (GENERATED + "D-1\t-0.5\tdrei\n", 3, "line 2 has two translations; generate with --nbest 1"),
        ("", 3, "3 of 3 lines have no translation, line 1 the first of them"),
    ],
)
def test_translations_that_do_not_fit_the_source_are_refused(
    tmp_path: Path, generated: str, lines: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "generated").write_text(generated)
    (tmp_path / "source").write_text("one\n" * lines)
    assert translations.main([str(tmp_path / name) for name in ("generated", "source", "out")]) == 1
    error = capsys.readouterr().err
    assert f"generated does not fit {tmp_path / 'source'}: {message}\n" in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_speed_and_score_are_read() -> None:
    assert run.read_speed(GENERATED) == {"sentences_per_second": 250.91}
    score = {"name": "BLEU", "score": 99.4, "signature": "nrefs:1|tok:13a", "verbose_score": "99 {"}
    assert run.read_bleu(f"a warning\n{json.dumps(score, indent=1)}\n") == {
        "score": 99.4,
        "signature": "nrefs:1|tok:13a",
    }


@pytest.mark.parametrize("read", ["read_speed", "read_bleu"])
def test_a_log_without_results_is_noticed(read: str) -> None:
    with pytest.raises(ValueError, match="its log has no"):
        getattr(run, read)("Traceback (most recent call last):\n")


def test_the_table_is_markdown_and_aligned() -> None:
    row = comparison.Row("Transformer", 241_664, 1.2, 99.4, "nrefs:1", 992, 1_000, 12_345.6, 250.91)
    lines = comparison.format_rows([row]).splitlines()
    assert len(lines) == 3 and len(set(map(len, lines))) == 1
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells == ["Transformer", "241,664", "99.40", "992 of 1,000", "12,346", "251"]


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({}, ["- s2 - reference: r2 - A: r2 - B: r2", "", "No translation is wrong."]),
        ({"B": [2]}, ["- s2 - reference: r2 - A: r2 - B, wrong: ?"]),
        ({"B": [2, 5, 6]}, ["", "One that the B gets wrong:", "", "- s5 - reference: r5 - A: r5 - B, wrong: ?"]),
        ({"A": [4], "B": [3]}, ["", "One that the A gets wrong:", "", "- s4 - reference: r4 - A, wrong: ? - B: r4"]),
    ],
)
def test_a_wrong_translation_is_shown_if_there_is_one(wrong: dict[str, list[int]], expected: list[str]) -> None:
    source, reference = [f"s{i}" for i in range(8)], [f"r{i}" for i in range(8)]
    outputs = {title: ["?" if i in wrong.get(title, []) else f"r{i}" for i in range(8)] for title in "AB"}
    lines = comparison.format_examples(source, reference, outputs).replace("\n  -", " -").splitlines()
    assert lines[:3] == ["The first of the test text:", "", "- s0 - reference: r0 - A: r0 - B: r0"]
    assert lines[-len(expected) :] == expected


# --- the program


@pytest.mark.parametrize("arguments", [["--updates", "0"], ["--updates", "x"], ["--seed", "-1"], ["--models", "lstm"]])
def test_options_that_make_no_sense_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.main(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_a_folder_of_the_other_demo_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "made-by-the-demo").touch()
    assert run.main(["--out", str(tmp_path)]) == 1
    assert "holds other files" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["made-by-the-demo"]


def test_a_missing_package_is_named_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = import_module("common.commands")
    monkeypatch.setattr(commands, "find_spec", lambda name: None if name == "num2words" else name)
    assert run.main(["--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert "there is no package num2words" in error and "`make setup` installs it" in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_make_starts_it() -> None:
    # As from a shell, though the tests are started by make themselves.
    plain = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}

    def make(*arguments: str) -> str:
        return subprocess.run(
            ["make", *arguments], cwd=ROOT, env=plain, capture_output=True, text=True, check=True
        ).stdout

    assert make("--dry-run", "demo-translation").splitlines()[-1] == f".venv/bin/python {RUN.relative_to(ROOT)}"
    assert "make demo-translation " in make()


# --- all of it


def demo(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", str(RUN), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT.parent,  # it works from anywhere
    )


@pytest.mark.slow
def test_the_demo_trains_translates_and_compares(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--out", str(out), "--updates", "4"]

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
    assert "writing numbers in words: done before" in shown
    assert "turning the text into numbers: done before" in shown
    for command in ("fairseq-train", "fairseq-generate", "translations.py", "sacrebleu"):
        assert command in shown
    table = (out / "table.md").read_text(encoding="utf-8")
    assert table in shown
    results = read_results(out)
    assert list(results) == [model.title for model in run.MODELS.values()]
    for title, row in results.items():
        assert f"| {title} " in table and row["signature"] in table
        assert 0 <= row["bleu"] <= 100 and 0 <= row["exact"] <= row["lines"] == number_text.SIZES["test"]
        assert row["valid"] > 1 and math.isfinite(row["valid"])
        assert row["tokens_per_second"] > 0 and row["sentences_per_second"] > 0
    # They differ in attention alone, which has the same projections.
    assert len({row["parameters"] for row in results.values()}) == 1
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    for name in run.MODELS:
        lines = (out / name / "translations" / "test.de").read_text(encoding="utf-8")
        assert lines.count("\n") == number_text.SIZES["test"]

    third = demo(*arguments)
    shown_again, _ = third.communicate(timeout=60)
    assert third.returncode == 0
    assert "fairseq-" not in shown_again and table in shown_again


@pytest.mark.slow
def test_numbers_that_were_never_seen_are_translated(tmp_path: Path) -> None:
    """What `make demo-translation` does in a third of the updates, without the softmax Transformer beside it."""
    out = tmp_path / "out"
    process = demo("--out", str(out), "--models", "linear-transformer", "--updates", "450")
    shown, error = process.communicate(timeout=1800)
    assert process.returncode == 0, error
    row = read_results(out)["Linear Transformer"]
    assert row["bleu"] >= 30, shown  # 45; what has not learned to count has none
    assert row["exact"] >= 0.2 * row["lines"]
    assert "tok:13a" in row["signature"] and "smooth:exp" in row["signature"]
    # By another way than the demo's: what lies in the folder is what was scored.
    texts = {
        path: path.read_text(encoding="utf-8").splitlines()
        for path in (out / "text" / "test.de", out / "linear-transformer" / "translations" / "test.de")
    }
    reference, output = texts.values()
    assert sum(a == b for a, b in zip(reference, output, strict=True)) == row["exact"]
    seen = set((out / "text" / "train.de").read_text(encoding="utf-8").splitlines())
    assert not seen & set(reference)


def read_results(out: Path) -> dict[str, dict[str, Any]]:
    """The rows of results.json by title."""
    return {row["title"]: row for row in json.loads((out / "results.json").read_text())["rows"]}
