"""The scripts of examples/wikitext103: the comparison on WikiText-2, its summary, and what prepares the text."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.conftest import import_plugin

from .conftest import WIKITEXT103, run_script, write_training

PREPARE, WIKITEXT2 = WIKITEXT103 / "prepare.sh", WIKITEXT103 / "wikitext2.sh"
SUMMARIZE, SPEED = WIKITEXT103 / "summarize.py", WIKITEXT103 / "speed.py"

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
@pytest.mark.parametrize("model", ["softmax", "delta", "sum-carried", "linformer", "transformer-xl-carried"])
def test_a_model_of_the_comparison_trains_and_is_scored(model: str, data: Path, tmp_path: Path, commands, fairseq):
    calls = commands(WIKITEXT2, data, tmp_path, model, env={"UPDATES": "2"})
    names = [call[0] for call in calls]
    assert names == ["fairseq-train", *["fairseq-eval-lm"] * (1 if model in ("softmax", "linformer") else 2)]
    for call in calls:
        fairseq(call)


@pytest.mark.slow
def test_the_comparison_runs_from_the_first_command_to_the_table(data: Path, tmp_path: Path, monkeypatch) -> None:
    result = run_script(WIKITEXT2, data, tmp_path / "out", "sum-carried", env={"UPDATES": "2"})
    assert result.returncode == 0, result.stderr
    again = run_script(WIKITEXT2, data, tmp_path / "out", "sum-carried", env={"UPDATES": "2"})
    assert again.returncode == 0 and "training" not in again.stdout

    summary = summarize(tmp_path / "out", "--markdown", tmp_path / "t.md", "--figure", tmp_path / "t.png")
    assert summary.returncode == 0, summary.stderr
    assert summary.stdout == (tmp_path / "t.md").read_text()
    table = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in summary.stdout.splitlines()}
    assert table["model"][3:6] == ["valid, in training", "test, sliding", "test, carried over"]
    assert table["sum-carried"][2] == "2" and "–" not in table["sum-carried"]
    assert table["delta-carried"][1] == "missing"
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")

    measured = run_script(SPEED, data, tmp_path / "out", "--rounds", "1")
    assert measured.returncode == 0, measured.stderr
    found = json.loads((tmp_path / "out" / "sum-carried" / "speed.json").read_text())
    # 4 layers of 8 heads, keys and values of 16, and the normaliser.
    assert found["state"] == 4 * 8 * 16 * 17 and found["training"] > 0 and found["generation"] > 0

    # Trained as it was trained: every segment that is timed goes on from the state of one before.
    import_plugin()
    monkeypatch.syspath_prepend(WIKITEXT103)
    speed, seen = import_module("speed"), []
    model = speed.Measured(tmp_path / "out" / "sum-carried", data)
    model.model.register_forward_pre_hook(lambda _, __, options: seen.append(options["continues"]), with_kwargs=True)
    model.train()
    assert len(seen) == 1 and seen[0].shape == (4,) and seen[0].all()


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


def test_a_summary_has_what_was_measured_and_draws_it(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run = write_training(tmp_path / name, 40)
        (run / "sliding.log").write_text("x | Loss (base 2): 5.0, Perplexity: 32.00\n")
    (tmp_path / "a" / "speed.json").write_text('{"state": 8192, "training": 2000.4, "generation": 99.6}')
    result = summarize(tmp_path, "--state-figure", tmp_path / "s.png")
    assert result.returncode == 0 and not result.stderr, result.stderr
    assert result.stdout.splitlines()[2:] == [
        "| a | 1,234,567 | 40 | 24.98 | 32.00 | 8,192 | 2,000 | 100 |",
        "| b | 1,234,567 | 40 | 24.98 | 32.00 | – | – | – |",
    ]
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "a" / "speed.json").write_text('{"state": 81')
    result = summarize(tmp_path, "--state-figure", tmp_path / "t.png")
    assert result.returncode == 1 and not (tmp_path / "t.png").exists()
    assert "a/speed.json is damaged" in result.stderr and "no model that is both scored and measured" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("DATA", "OUT", "--rounds", "0"), "--rounds is 0; it must be at least 1"),
        (("DATA", "OUT"), "which holds no trained model"),
        (("DATA", "OUT", "never"), "never holds no checkpoint_best.pt"),
        (("DATA", "OUT", "sum"), "DATA is DATA, which holds no dict.txt"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "sum").mkdir()
    (tmp_path / "sum" / "checkpoint_best.pt").touch()
    result = run_script(SPEED, *(x.replace("OUT", str(tmp_path)) for x in arguments))
    assert result.returncode == 2 and message in result.stderr


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
