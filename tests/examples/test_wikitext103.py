"""The scripts of examples/wikitext103: the comparison on WikiText-2, its summary, and what prepares the text."""

import gzip
import json
import runpy
import shutil
from argparse import Namespace
from pathlib import Path

import papers
import pytest
from common.sentencepieces import SentencePieces

from tests.conftest import import_plugin

from .conftest import EXAMPLES, INTERRUPTION, Programs, Result, run_script, write_training

FOLDER = EXAMPLES / "wikitext103"
PREPARE, WIKITEXT2 = FOLDER / "prepare.sh", FOLDER / "wikitext2.sh"
SUMMARIZE, SPEED = FOLDER / "summarize.py", FOLDER / "speed.py"

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of fairseq and what it calls


@pytest.mark.slow
def test_the_comparison_runs_from_the_first_command_to_the_table(data: Path, tmp_path: Path, run) -> None:
    """As a person runs it, for one model."""
    out = tmp_path / "out"
    for trains in (True, False):
        result = run_script(WIKITEXT2, data, out, "sum-carried", env={"UPDATES": "2"})
        assert result.returncode == 0 and ("training" in result.stdout) == trains, result.stderr

    status, shown, _ = run(SUMMARIZE, out, "--markdown", tmp_path / "t.md", "--figure", tmp_path / "t.png")
    assert status == 0 and shown == (tmp_path / "t.md").read_text()
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in shown.splitlines()]
    table = {line[0]: line for line in lines}
    assert table["model"][3:6] == ["valid, in training", "test, sliding", "test, carried over"]
    assert table["sum-carried"][2] == "2" and "–" not in table["sum-carried"][:-1]  # two updates have no speed yet
    assert table["delta-carried"][1] == "missing"
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")

    import_plugin()
    status, _, errors = run(SPEED, data, out, "--rounds", "1")
    assert status == 0, errors
    found = json.loads((out / "sum-carried" / "speed.json").read_text())
    # 4 layers of 8 heads, keys and values of 16, and the normaliser.
    assert found["state"] == 4 * 8 * 16 * 17 and found["training"] > 0 and found["generation"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["softmax", "delta", "linformer", "transformer-xl-carried"])
def test_a_model_of_the_comparison_trains_and_is_scored(model: str, data: Path, tmp_path: Path, commands, fairseq):
    calls = commands(WIKITEXT2, data, tmp_path, model, env={"UPDATES": "2"})
    names = [call[0] for call in calls]
    assert names == ["fairseq-train", *["fairseq-eval-lm"] * (1 if model in ("softmax", "linformer") else 2)]
    for call in calls[:2]:
        fairseq(call)


def test_a_summary_tells_the_best_validation_the_scores_and_what_was_measured(tmp_path: Path, run) -> None:
    def rows(*words: object) -> list[str]:
        status, table, errors = run(SUMMARIZE, tmp_path, *words)
        assert status == 0 and not errors
        return [" ".join(line.split()) for line in table.splitlines()[2:]]

    a, b = write_training(tmp_path / "a", 40), write_training(tmp_path / "b", 20)
    score = "x | Loss (base 2): 5.0, Perplexity: 32.00\n"
    (a / "carried-test.log").write_text(score)
    assert rows() == ["| a | 1,234,567 | 40 | 24.98 | 32.00 | 1,000 |", "| b | 1,234,567 | 20 | 49.95 | – | 1,000 |"]
    (b / "sliding.log").write_text(score)
    (a / "speed.json").write_text('{"state": 8192, "training": 2000.4, "generation": 99.6}')
    assert rows("--state-figure", tmp_path / "s.png") == [
        "| a | 1,234,567 | 40 | 24.98 | – | 32.00 | 8,192 | 2,000 | 100 |",
        "| b | 1,234,567 | 20 | 49.95 | 32.00 | – | – | – | – |",
    ]
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    (a / "speed.json").write_text('{"state": 81')
    status, _, errors = run(SUMMARIZE, tmp_path, "--state-figure", tmp_path / "t.png")
    assert status == 1 and not (tmp_path / "t.png").exists()
    assert "a/speed.json is damaged" in errors and "no model that is both scored and measured" in errors


def test_the_figure_of_states_is_drawn_from_the_table_of_a_page(tmp_path: Path, run) -> None:
    page, figure = FOLDER.parents[1] / "docs" / "results.md", tmp_path / "s.png"
    assert run(SUMMARIZE, page, "--state-figure", figure)[0] == 0 and figure.read_bytes().startswith(b"\x89PNG")
    points = runpy.run_path(str(SUMMARIZE))["read_points"](page.read_text())
    # A model without a score of one kind, one that is better in a window, and one that is better carried over.
    assert len(points) == 14 and points["softmax"] == (262144, 237.09)
    assert points["gated"] == (8192, 205.33) and points["sum-carried"] == (8704, 300.04)
    status, _, errors = run(SUMMARIZE, page, "--figure", figure)
    assert status == 2 and "only --state-figure can be drawn" in errors


def test_a_summary_says_what_is_unfinished_or_missing(tmp_path: Path, run) -> None:
    cut, early = (write_training(tmp_path / name, n, finished=False) for name, n in (("cut", 50), ("early", 0)))
    with (cut / "train.log").open("a") as log:
        log.write('2026-01-01 00:00:00 | INFO | train_inner | {"num_upd')
    (cut / "sliding.log").write_text("loading\n")
    (early / "train.log").write_text("starting\n")
    status, table, errors = run(SUMMARIZE, tmp_path, "cut", "early", "never")
    table = " ".join(table.split())
    assert "| cut | 1,234,567 | 50 (unfinished) | 24.98 | 1,000 |" in table and "| never | missing |" in table
    told = "cut/train.log is of an unfinished training|cut/train.log has a damaged line|never/train.log is missing"
    told += "|cut/sliding.log ends before the perplexity|early/train.log ends before the model was built"
    assert status == 0 and all(message in errors for message in told.split("|"))


@pytest.mark.slow
def test_prepare_numbers_the_words_as_a_dictionary_that_is_given(published: Path, tokens: Path, tmp_path: Path) -> None:
    out, given = tmp_path / "out", published / "dict.txt"
    result = run_script(PREPARE, out, tokens, env={"SKIP_COUNTS": "1", "DICT": given})
    assert result.returncode == 0 and "unknown corpus in" in result.stdout, result.stderr
    made, wanted = (
        [line.split(" ")[0] for line in path.read_text().splitlines()] for path in (out / "dict.txt", given)
    )
    assert made == wanted and (out / "preprocess.log").read_text().count(" 0.0% replaced (by <unk>)") == 3
    again = run_script(PREPARE, out, "FOLDER", env={"DICT": given})
    assert again.returncode == 0 and "is finished" in again.stdout
    (tmp_path / "dict.txt").write_text("another 1\n")
    other = run_script(PREPARE, out, "FOLDER", env={"DICT": tmp_path / "dict.txt"})
    assert other.returncode == 1 and "its words are not those of DICT" in other.stderr


@pytest.mark.slow
def test_prepare_cuts_words_into_subwords_of_which_a_perplexity_of_a_word_is_told(tokens: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run_script(PREPARE, out, tokens, env={"SKIP_COUNTS": "1", "SUBWORDS": "340"})
    assert result.returncode == 0 and "339 subword types" in result.stdout, result.stderr
    assert (out / "preprocess.log").read_text().count(" 0.0% replaced (by <unk>)") == 3
    counts = json.loads((out / "words.json").read_text())["test"]
    binarised = (out / "test.bin").stat().st_size // 2
    assert counts == {"words": 4 * 40 + 3 + 7, "subwords": binarised} and counts["words"] < binarised
    pieces = SentencePieces((out / "subwords.model").read_bytes())
    words = [line.split(" ")[0] for line in (out / "dict.txt").read_text().splitlines()]
    assert pieces.dictionary == [word for word in words if not word.startswith("madeupword")]
    assert pieces.decode(pieces.encode(["the □ @-@ 日本"])[0]) == "the □ @-@ 日本"

    recipe, call = papers.SCALED["wikitext2"].rows["delta"].recipe, Namespace(title="test, carried")
    scores = recipe.scores(call, Namespace(data=out), "x | Loss (base 2): 2.0, Perplexity: 4.00\n")
    assert scores == {"test, carried": 4.0, "test, carried, per word": 4 ** (binarised / counts["words"])}
    (tmp_path / "square").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / "square" / f"wiki.{split}.tokens").write_text("a □ b\n")
    result = run_script(PREPARE, tmp_path / "no", tmp_path / "square", env={"SKIP_COUNTS": "1", "SUBWORDS": "340"})
    assert result.returncode == 1 and "line 1 has a □, which stands for <unk>" in result.stderr


def test_prepare_leaves_something_that_looks_finished_only_where_it_is(tmp_path: Path) -> None:
    """With three files of known counts, 7, 3 and 3 tokens with line ends, plain or gzipped."""
    small, out, unfinished = (tmp_path / name for name in ("small", "out", "out.unfinished"))
    small.mkdir()
    # Words of bytes above 127 only, and white space above 127: both count as they do for fairseq in any locale.
    (small / "wiki.train.tokens").write_text(" \n – 日本\u3000b \n\u00a0c \n", encoding="utf-8")
    (small / "wiki.valid.tokens.gz").write_bytes(gzip.compress(b" a b \n"))
    (small / "wiki.test.tokens").write_text(" a b \n")
    body = f'mkdir -p "$dest" && seq 5 > "$dest/dict.txt"\n{INTERRUPTION}'
    programs = Programs(tmp_path / "programs", {"fairseq-preprocess": body})

    def prepare(**env: object) -> Result:
        return programs.run(PREPARE, f"{out}/", small, env={"SKIP_COUNTS": "1", **env})[0]

    for signal in ("INT", "TERM", "KILL"):
        assert prepare(INTERRUPT=signal).returncode != 0 and not out.exists()
        result = prepare()
        assert "7 3 3 tokens" in result.stdout and (out / "dict.txt").exists() and not unfinished.exists()
        shutil.rmtree(out)
    for name, content, message in (
        ("wiki.test.tokens", b" a b \n", "have 7 3 3 tokens with line ends, which is neither WikiText-103"),
        ("wiki.test.tokens", b"", "wiki.test.tokens is empty"),
        ("wiki.test.tokens", b"\x1f\x8b\xff\n", "is not text in UTF-8"),
    ):
        (small / name).write_bytes(content)
        result = prepare(SKIP_COUNTS="0")
        assert result.returncode == 1 and message in result.stderr and not out.exists() and not unfinished.exists()
    (small / "wiki.valid.tokens.gz").unlink()
    assert "holds neither wiki.valid.tokens nor" in prepare().stderr and not out.exists() and not unfinished.exists()
