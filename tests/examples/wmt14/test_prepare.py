"""examples/wmt14/prepare.sh: what is kept, what fairseq is given, and what is done again and what not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.examples.conftest import options
from tests.examples.wmt14.conftest import PREPARE, Programs, corpus, subwords, write_pairs


def test_prepared_data_hold_the_subwords_of_all_pairs_and_the_text_as_it_came(stub_data: Path, parallel: Path) -> None:
    model = subwords.SentencePieces((stub_data / "subwords.model").read_bytes())
    for split, count in (("train", 300), ("valid", 6), ("test", 4)):
        for language in ("en", "de"):
            raw = corpus.read_text(parallel / f"{split}.{language}")
            cut = corpus.read_text(stub_data / f"{split}.{language}")
            assert len(cut) == count - (split == "train") * (300 - len(cut))
            if split == "train":
                assert set(map(model.decode, cut)) <= set(raw)
            else:
                assert list(map(model.decode, cut)) == list(map(corpus.clean, raw))
                assert corpus.read_text(stub_data / "raw" / f"{split}.{language}") == raw
    record = json.loads((stub_data / "preparation.json").read_text())
    assert record["made from"]["text"] == corpus.survey(parallel, "en", "de").digest
    assert record["pairs"]["test"] == {"kept": 4}
    assert not stub_data.with_name("data.unfinished").exists()


def test_pairs_fall_out_for_reasons_that_are_counted(tmp_path: Path, programs: Programs) -> None:
    good, long = [("a b c", "a b d")] * 20, [("a b c a b c", "a b c a b c")] * 3
    empty, uneven = [("", "a b"), (" \u00a0", "a"), ("a", "")], [("a b c", "a b c a b"), ("a b c", "a")]
    (tmp_path / "text").mkdir()
    write_pairs(tmp_path / "text", "train", [*empty, *good, *long, *uneven])
    for split in ("valid", "test"):  # of these none falls out
        write_pairs(tmp_path / "text", split, [*empty, *good, *long, *uneven])
    env = {"VOCABULARY": 268, "MAX_LENGTH": 5}  # each letter a subword, with the space before it
    result = programs.prepare(tmp_path / "out", tmp_path / "text", **env)
    assert (
        "train: 20 of 28 pairs kept; fell out: 3 with an empty line, 3 of more than 5 subwords, 2 with a ratio above "
        "1.5; valid: 28, test: 28\n"
    ) in result.stdout, result.stdout + result.stderr
    assert len(corpus.read_text(tmp_path / "out" / "train.en")) == 20
    result = programs.prepare(tmp_path / "wide", tmp_path / "text", **env, MAX_RATIO=3)
    assert "train: 22 of 28 pairs kept" in result.stdout
    result = programs.prepare(tmp_path / "none", tmp_path / "text", **{**env, "MAX_LENGTH": 1})
    assert result.returncode == 1 and "no pair of the training text is left: train: 0 of 28 pairs" in result.stderr


def test_fairseq_is_given_all_subwords_and_a_round_number_of_them(
    parallel: Path, tmp_path: Path, programs: Programs
) -> None:
    env = {"VOCABULARY": 361, "WORKERS": 1}
    _, calls = programs.run(PREPARE, tmp_path / "out", parallel, env={**env, "INTERRUPT": "TERM"})
    asked = options(calls[0])
    assert "--joined-dictionary" in asked and (asked["--source-lang"], asked["--target-lang"]) == ("en", "de")
    rows = [line.rsplit(" ", 1) for line in corpus.read_text(Path(asked["--srcdict"]))]
    real = [word for word, _ in rows if not word.startswith("madeupword")]
    assert len(real) == 361 - 3 and (len(rows) + 4) % 8 == 0 and len(rows) - len(real) < 8
    counts = [int(count) for _, count in rows]
    assert counts == sorted(counts, reverse=True) and "<0xE6>" in real
    cut = corpus.read_text(Path(asked["--trainpref"] + ".en")) + corpus.read_text(Path(asked["--trainpref"] + ".de"))
    assert sum(counts) == sum(len(line.split()) for line in cut)


@pytest.mark.parametrize("signal", ["INT", "TERM", "KILL"])
def test_an_interrupted_preparation_goes_on(signal: str, parallel: Path, tmp_path: Path, programs: Programs) -> None:
    out = tmp_path / "out"
    cut = programs.prepare(out, parallel, INTERRUPT=signal)
    assert cut.returncode != 0 and not out.exists() and "binarising" in cut.stdout
    assert not [path for path in (tmp_path / "out.unfinished").glob("finished-*") if path.suffix != ".part"]
    again = programs.prepare(out, parallel)
    assert again.returncode == 0 and (out / "preparation.json").exists(), again.stderr
    assert "cleaning" not in again.stdout and "learning" not in again.stdout and "binarising" in again.stdout
    assert not (tmp_path / "out.unfinished").exists()


def test_a_finished_folder_is_left_as_it_is_and_never_made_of_something_else(
    stub_data: Path, parallel: Path, tmp_path: Path, programs: Programs
) -> None:
    before = {path: path.stat().st_mtime_ns for path in stub_data.rglob("*")}
    again = programs.prepare(f"{stub_data}/", parallel)
    assert again.returncode == 0 and again.stdout == f"{stub_data} is finished\n"
    other = programs.prepare(stub_data, parallel, VOCABULARY=370, SUBWORDS="bpe")
    assert other.returncode == 1 and "subwords sentencepiece, not bpe, vocabulary 360, not 370" in other.stderr
    shutil.copytree(parallel, tmp_path / "copy")
    write_pairs(tmp_path / "copy", "valid", [("a", "b")])
    other = programs.prepare(stub_data, tmp_path / "copy")
    assert other.returncode == 1 and "was made with other text; name another folder" in other.stderr
    assert before == {path: path.stat().st_mtime_ns for path in stub_data.rglob("*")}
