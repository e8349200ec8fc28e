"""The scripts of examples/wikitext103: the comparison on WikiText-2, its summary, and what prepares the text."""

from __future__ import annotations

import gzip
import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from .conftest import WIKITEXT103, make_newer, run_script, write_training

PREPARE, WIKITEXT2 = WIKITEXT103 / "prepare.sh", WIKITEXT103 / "wikitext2.sh"
SUMMARIZE = WIKITEXT103 / "summarize.py"

# fairseq and what it calls, attributed to the line that calls fairseq.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

# --- wikitext2.sh


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        (["DATA"], {}, "wikitext2.sh DATA OUT [MODEL ...]"),
        (["nowhere", "OUT"], {}, "DATA is nowhere, which holds no dict.txt"),
        (["DATA", "OUT", "gamma"], {}, "MODEL is gamma; it must be one of softmax sum delta"),
        (["DATA", "OUT"], {"UPDATES": "0"}, "UPDATES is 0; it must be a positive number"),
        (["DATA", "OUT"], {"JOBS": "all"}, "JOBS is all; it must be a positive number"),
    ],
)
def test_wrong_use_is_refused_and_leaves_nothing_behind(
    arguments: list[str], env: dict[str, str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "dict.txt").touch()
    places = {"DATA": str(tmp_path), "OUT": str(tmp_path / "OUT")}
    result = run_script(WIKITEXT2, *(places.get(word, word) for word in arguments), env=env)
    assert result.returncode != 0
    assert message in result.stderr
    assert not (tmp_path / "OUT").exists()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["softmax", "delta", "delta-no-positions", "sum-carried", "delta-carried"])
def test_a_model_of_the_comparison_trains_and_is_scored(model: str, data: Path, tmp_path: Path, commands, fairseq):
    calls = commands(WIKITEXT2, data, tmp_path, model, env={"UPDATES": "2"})
    names = [call[0] for call in calls]
    assert names == ["fairseq-train", *["fairseq-eval-lm"] * (1 if model == "softmax" else 2)]
    for call in calls:
        fairseq(call)


@pytest.mark.slow
def test_the_comparison_runs_from_the_first_command_to_the_table(data: Path, tmp_path: Path) -> None:
    result = run_script(WIKITEXT2, data, tmp_path / "out", "sum", env={"UPDATES": "2"})
    assert result.returncode == 0, result.stderr
    again = run_script(WIKITEXT2, data, tmp_path / "out", "sum", env={"UPDATES": "2"})
    assert again.returncode == 0 and "training" not in again.stdout

    summary = summarize(tmp_path / "out", "--markdown", tmp_path / "t.md", "--figure", tmp_path / "t.png")
    assert summary.returncode == 0, summary.stderr
    assert summary.stdout == (tmp_path / "t.md").read_text()
    table = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in summary.stdout.splitlines()}
    assert table["model"][3:6] == ["valid, in training", "test, sliding", "test, carried over"]
    assert table["sum"][2] == "2" and "–" not in table["sum"]
    assert table["delta-carried"][1] == "missing"
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_the_comparison_is_not_trained_on_from_checkpoints_without_optimizer(tmp_path: Path, commands) -> None:
    (tmp_path / "dict.txt").touch()
    (tmp_path / "sum").mkdir()
    for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
        (tmp_path / "sum" / name).touch()
    assert len(commands(WIKITEXT2, tmp_path, tmp_path, "sum")) == 3
    assert not list((tmp_path / "sum").glob("*.pt"))


def test_the_comparison_scores_a_model_again_that_was_trained_again(tmp_path: Path, commands) -> None:
    out = tmp_path / "out"
    (out / "sum").mkdir(parents=True)
    for name in ("dict.txt", "sum/trained", "sum/checkpoint_best.pt"):
        (out / name).touch()
    assert len(commands(WIKITEXT2, out, out, "sum")) == 2
    assert commands(WIKITEXT2, out, out, "sum") == []
    make_newer(out / "sum" / "checkpoint_best.pt")
    assert len(commands(WIKITEXT2, out, out, "sum")) == 2


# --- summarize.py


def summarize(*arguments: object) -> subprocess.CompletedProcess:
    return run_script(SUMMARIZE, *arguments)


def test_a_summary_tells_the_best_validation_and_the_scores(tmp_path: Path) -> None:
    run = write_training(tmp_path / "a", 40)
    (run / "carried-test.log").write_text("x | Loss (base 2): 5.0, Perplexity: 32.00\n")
    write_training(tmp_path / "b", 20)
    result = summarize(tmp_path)
    assert not result.stderr
    assert result.stdout.splitlines()[2:] == [
        "| a | 1,234,567 | 40 | 24.98 | 32.00 | 1,000 |",
        "| b | 1,234,567 | 20 | 49.95 | – | 1,000 |",
    ]


def test_a_summary_tells_checkpoints_apart(tmp_path: Path) -> None:
    for model, logs in (
        ("a", {"context-0-test": 32, "context-0-test.checkpoint_last": 34}),
        ("b", {"context-0-valid.checkpoint_last": 36}),
    ):
        write_training(tmp_path / model, 20)
        for name, perplexity in logs.items():
            (tmp_path / model / f"{name}.log").write_text(f"x | Loss (base 2): 5.0, Perplexity: {perplexity}.00\n")
    result = summarize(tmp_path)
    assert not result.stderr
    columns = "valid, context 0 (checkpoint_last) | test, context 0 | test, context 0 (checkpoint_last)"
    header, _, *rows = result.stdout.splitlines()
    assert f"| valid, in training | {columns} |" in header
    assert rows == [
        "| a | 1,234,567 | 20 | 49.95 | – | 32.00 | 34.00 | 1,000 |",
        "| b | 1,234,567 | 20 | 49.95 | 36.00 | – | – | 1,000 |",
    ]


def test_a_summary_says_what_is_unfinished_or_missing(tmp_path: Path) -> None:
    cut = write_training(tmp_path / "cut", 50, finished=False)
    with (cut / "train.log").open("a") as log:
        log.write('2026-01-01 00:00:00 | INFO | train_inner | {"num_upd')
    (cut / "sliding.log").write_text("loading\n")
    early = write_training(tmp_path / "early", 0, finished=False)
    (early / "train.log").write_text("starting\n")
    result = summarize(tmp_path, "cut", "early", "never")
    assert result.returncode == 0
    assert "| cut | 1,234,567 | 50 (unfinished) | 24.98 | 1,000 |" in result.stdout
    assert "| never | missing |" in result.stdout
    for message in (
        "cut/train.log is of an unfinished training: it ends at update 50, last validation at update 40",
        "cut/train.log has a damaged line",
        "cut/sliding.log ends before the perplexity",
        "early/train.log ends before the model was built",
        "never/train.log is missing",
    ):
        assert message in result.stderr


@pytest.mark.parametrize(("folder", "message"), [("nowhere", "no folder"), (".", "holds no folder with the log")])
def test_nothing_to_summarize_is_an_error(folder: str, message: str, tmp_path: Path) -> None:
    result = summarize(tmp_path / folder)
    assert result.returncode == 1 and message in result.stderr and not result.stdout


def test_the_summary_knows_the_models_of_the_comparison() -> None:
    listed = next(line for line in WIKITEXT2.read_text().splitlines() if line.startswith("models=("))
    assert runpy.run_path(str(SUMMARIZE))["WIKITEXT2"] == tuple(listed[len("models=(") : -1].split())


# --- prepare.sh


@pytest.fixture
def quick(tmp_path: Path) -> dict[str, str]:
    """An environment whose fairseq-preprocess does no more than prepare.sh needs: TYPES lines of dict.txt."""
    programs = tmp_path / "quick"
    programs.mkdir()
    (programs / "fairseq-preprocess").write_text(
        """#!/bin/bash
while [ "$1" != --destdir ]; do shift; done
mkdir -p "$2" && seq "${TYPES:-5}" > "$2/dict.txt"
[ -z "${INTERRUPT:-}" ] || { kill -"$INTERRUPT" $PPID; sleep 0.5; exit 1; }
"""
    )
    (programs / "fairseq-preprocess").chmod(0o755)
    (programs / "python").symlink_to(sys.executable)
    return {"PATH": os.pathsep.join([str(programs), os.environ["PATH"]]), "SKIP_COUNTS": "1"}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Three files of known counts: 7, 3 and 3 tokens with line ends."""
    folder = tmp_path / "small"
    folder.mkdir()
    # Words of bytes above 127 only, and white space above 127: both count as they do for fairseq in any locale.
    (folder / "wiki.train.tokens").write_text(" \n – 日本\u3000b \n\u00a0c \n", encoding="utf-8")
    for split in ("valid", "test"):
        (folder / f"wiki.{split}.tokens").write_text(" a b \n")
    return folder


def test_a_prepared_corpus_is_what_fairseq_reads(data: Path) -> None:
    assert {f"{split}.{kind}" for split in ("train", "valid", "test") for kind in ("bin", "idx")} <= {
        file.name for file in data.iterdir()
    }
    assert not data.with_name("bin.unfinished").exists()


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_counts_are_the_same_in_any_locale(locale: str, small: Path, tmp_path: Path, quick) -> None:
    result = run_script(PREPARE, tmp_path / "out", small, env={**quick, "LC_ALL": locale})
    assert result.returncode == 0, result.stderr
    assert "7 3 3 tokens with line ends" in result.stdout


def test_plain_and_gzipped_files_are_taken_and_a_second_run_does_nothing(small: Path, tmp_path: Path, quick) -> None:
    train = small / "wiki.train.tokens"
    (small / "wiki.train.tokens.gz").write_bytes(gzip.compress(train.read_bytes()))
    train.unlink()
    out = tmp_path / "deep" / "out"
    assert "7 3 3 tokens" in run_script(PREPARE, out, small, env=quick).stdout
    shutil.rmtree(small)
    again = run_script(PREPARE, f"{out}/", small, env=quick)
    assert again.returncode == 0 and "is finished" in again.stdout
    assert sorted(path.name for path in out.parent.iterdir()) == ["out"]


@pytest.mark.slow
def test_the_words_of_a_dictionary_are_numbered_as_they_are_there(published: Path, numbered: Path, quick) -> None:
    def words(folder: Path) -> list[str]:
        return [line.split(" ")[0] for line in (folder / "dict.txt").read_text(encoding="utf-8").splitlines()]

    assert words(numbered) == words(published)
    log = (numbered / "preprocess.log").read_text()
    assert log.count(" 0.0% replaced (by <unk>)") == 3
    again = run_script(PREPARE, numbered, "FOLDER", env={**quick, "DICT": str(published / "dict.txt")})
    assert again.returncode == 0 and "is finished" in again.stdout


def test_data_of_another_dictionary_are_not_taken_for_finished(small: Path, tmp_path: Path, quick) -> None:
    assert run_script(PREPARE, tmp_path / "out", small, env=quick).returncode == 0
    (tmp_path / "dict.txt").write_text("2 1\n1 1\n3 1\n4 1\n5 1\n")
    result = run_script(PREPARE, tmp_path / "out", small, env={**quick, "DICT": str(tmp_path / "dict.txt")})
    assert result.returncode == 1 and "its words are not those of DICT" in result.stderr
    result = run_script(PREPARE, tmp_path / "new", small, env={**quick, "DICT": "nowhere"})
    assert result.returncode == 1 and "DICT is nowhere" in result.stderr
    assert not (tmp_path / "new").exists() and not (tmp_path / "new.unfinished").exists()


def test_wikitext2_is_known_by_its_counts_and_checked_by_its_word_types(tmp_path: Path, quick) -> None:
    folder = tmp_path / "wikitext-2"
    folder.mkdir()
    for split, count in (("train", 2_088_628), ("valid", 217_646), ("test", 245_569)):
        (folder / f"wiki.{split}.tokens").write_text(" a" * (count - 1) + " \n")
    wrong = run_script(PREPARE, tmp_path / "out", folder, env={**quick, "SKIP_COUNTS": "0", "TYPES": "33000"})
    assert wrong.returncode == 1 and not (tmp_path / "out").exists()
    assert "WikiText-2 has 33278 word types with <unk> and line end, but these files have 33002" in wrong.stderr
    right = run_script(PREPARE, tmp_path / "out", folder, env={**quick, "SKIP_COUNTS": "0", "TYPES": "33276"})
    assert right.returncode == 0 and right.stdout.startswith("WikiText-2 in ")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: None, "have 7 3 3 tokens with line ends, which is neither WikiText-103"),
        (lambda folder: (folder / "wiki.valid.tokens").unlink(), "holds neither wiki.valid.tokens nor"),
        (lambda folder: (folder / "wiki.test.tokens").write_text(""), "wiki.test.tokens is empty"),
        (lambda folder: (folder / "wiki.test.tokens").write_bytes(b"\x1f\x8b\xff\n"), "is not text in UTF-8"),
        (shutil.rmtree, "there is no folder"),
    ],
    ids=["counts", "missing", "empty", "binary", "no folder"],
)
def test_a_corpus_that_is_not_right_is_refused(damage, message: str, small: Path, tmp_path: Path, quick) -> None:
    damage(small)
    result = run_script(PREPARE, tmp_path / "out", small, env={**quick, "SKIP_COUNTS": "0"})
    assert result.returncode == 1 and message in result.stderr
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.unfinished").exists()


def test_a_folder_with_something_else_in_it_is_not_written_to(small: Path, tmp_path: Path, quick) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    result = run_script(PREPARE, tmp_path / "out", small, env=quick)
    assert result.returncode == 1 and "is there, but is not what this script makes" in result.stderr
    (tmp_path / "out" / "mine").unlink()
    assert run_script(PREPARE, tmp_path / "out", small, env=quick).returncode == 0


@pytest.mark.parametrize("signal", ["INT", "TERM", "KILL"])
def test_an_interrupted_run_leaves_nothing_that_looks_finished(signal, small: Path, tmp_path: Path, quick) -> None:
    out = tmp_path / "out"
    result = run_script(PREPARE, out, small, env={**quick, "INTERRUPT": signal})
    assert result.returncode != 0 and not out.exists()
    assert run_script(PREPARE, out, small, env=quick).returncode == 0
    assert (out / "dict.txt").exists() and not (tmp_path / "out.unfinished").exists()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_a_download_goes_on_where_it_was_cut_off(small: Path, tmp_path: Path, quick) -> None:
    archive, out = tmp_path / "served.zip", tmp_path / "out"
    with zipfile.ZipFile(archive, "w") as served:
        for file in small.iterdir():
            served.write(file, f"wikitext-103/{file.name}")
    env = {**quick, "WIKITEXT_URL": archive.as_uri()}
    failed = run_script(PREPARE, out, env={**quick, "WIKITEXT_URL": (tmp_path / "gone.zip").as_uri()})
    assert failed.returncode == 1 and "cannot download" in failed.stderr and not out.exists()

    part = tmp_path / "out.unfinished" / "wikitext-103-v1.zip.part"
    part.parent.mkdir(exist_ok=True)
    part.write_bytes(archive.read_bytes()[:100])
    result = run_script(PREPARE, out, env=env)
    assert result.returncode == 0, result.stderr
    assert (out / "dict.txt").exists() and not part.parent.exists()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_a_damaged_download_is_deleted(tmp_path: Path, quick) -> None:
    (tmp_path / "served.zip").write_bytes(b"<html>moved</html>")
    result = run_script(PREPARE, tmp_path / "out", env={**quick, "WIKITEXT_URL": (tmp_path / "served.zip").as_uri()})
    assert result.returncode == 1 and "is damaged and was deleted" in result.stderr
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.unfinished").exists()
