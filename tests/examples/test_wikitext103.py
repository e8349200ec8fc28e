"""The script of examples/wikitext103 that prepares the text."""

import gzip
import json
import shutil
from argparse import Namespace
from pathlib import Path

import papers
import pytest
from common.sentencepieces import SentencePieces

from .conftest import EXAMPLES, INTERRUPTION, Programs, Result, run_script

PREPARE = EXAMPLES / "wikitext103" / "prepare.sh"


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
def test_prepare_cuts_words_into_subwords_and_scores_are_per_word(tokens: Path, tmp_path: Path) -> None:
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

    for signal in ("INT", "KILL"):
        assert prepare(INTERRUPT=signal).returncode != 0 and not out.exists()
        result = prepare()
        assert "7 3 3 tokens" in result.stdout and (out / "dict.txt").exists() and not unfinished.exists()
        shutil.rmtree(out)
    for name, content, message in (
        ("wiki.test.tokens", b" a b \n", "have 7 3 3 tokens with line ends, which is neither WikiText-103"),
        ("wiki.test.tokens", b"", "wiki.test.tokens is empty"),
        ("wiki.test.tokens", b"\x1f\x8b\xff\n", "wiki.test.tokens, line 1: not UTF-8, byte 2 of the line is 0x8b"),
    ):
        (small / name).write_bytes(content)
        result = prepare(SKIP_COUNTS="0")
        assert result.returncode == 1 and message in result.stderr and not out.exists() and not unfinished.exists()
    (small / "wiki.valid.tokens.gz").unlink()
    assert "holds neither wiki.valid.tokens nor" in prepare().stderr and not out.exists() and not unfinished.exists()
