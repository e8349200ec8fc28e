"""examples/wmt14/prepare.sh: text that is read, cut into subwords, kept or refused, downloaded, done again or not."""

import gzip
import hashlib
import json
import re
import shutil
import tarfile
from pathlib import Path

import corpus
import pytest
import subwords
from common.files import TextError

from tests.examples.conftest import options
from tests.examples.wmt14.conftest import PREPARE, Programs, contents, write_pairs


def test_text_is_known_by_its_content_compressed_or_not(parallel: Path, tmp_path: Path) -> None:
    assert corpus.clean(" \ufeffa\tb  c\u2028d\u00a0e\u3000f\x85g\x00h\x1fi ") == "a b c d e f g h i"
    whole, copy = corpus.survey(parallel, "en", "de"), shutil.copytree(parallel, tmp_path / "copy")
    (copy / "train.en.gz").write_bytes(gzip.compress((copy / "train.en").read_bytes()))
    (copy / "train.en").unlink()
    again = corpus.survey(copy, "en", "de")
    assert again.digest == whole.digest and again.pairs == {"train": 300, "valid": 6, "test": 4}
    assert corpus.survey(parallel, "de", "en").digest != whole.digest


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("valid.de", None, "holds neither valid.de nor valid.de.gz"),
        ("valid.de.gz", b"", "holds both valid.de and valid.de.gz; one of them must go"),
        ("test.en", b"", "test.en is empty"),
        ("train.en", b"a\nb\n", r"train\.en has 2 lines and .*/train\.de has 300"),
    ],
)
def test_text_that_is_not_right_is_refused(name: str, content: bytes, message: str, parallel, tmp_path) -> None:
    path = shutil.copytree(parallel, tmp_path / "copy") / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(TextError, match=message):
        corpus.survey(path.parent, "en", "de")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sentencepiece", "bpe"])
def test_a_vocabulary_is_refused_and_the_possible_one_works(kind, parallel, tmp_path, programs) -> None:
    result = programs.prepare(tmp_path / "out", parallel, VOCABULARY=100_000, SUBWORDS=kind)
    assert result.returncode == 1 and not (tmp_path / "out").exists()
    [possible] = re.findall(r"VOCABULARY is 100000; this text gives at most (\d+)", result.stderr)
    again = programs.prepare(tmp_path / "out", parallel, VOCABULARY=possible, SUBWORDS=kind)
    assert again.returncode == 0 and "cleaning" not in again.stdout, again.stderr


def test_prepared_data_hold_all_pairs_subwords_and_the_text_as_it_came(stub_data: Path, parallel: Path) -> None:
    model = subwords.SentencePieces((stub_data / "subwords.model").read_bytes())
    for name in (f"{split}.{language}" for split in ("train", "valid", "test") for language in ("en", "de")):
        raw, cut = corpus.read_text(parallel / name), list(map(model.decode, corpus.read_text(stub_data / name)))
        if name.startswith("train"):
            assert cut and set(cut) <= set(raw)
        else:
            assert cut == list(map(corpus.clean, raw)) and corpus.read_text(stub_data / "raw" / name) == raw


def test_pairs_fall_out_for_reasons_that_are_counted(tmp_path: Path, programs: Programs) -> None:
    pairs = [("", "a b"), (" \u00a0", "a"), ("a", "")] + [("a b c", "a b d")] * 20
    pairs += [("a b c a b c", "a b c a b c")] * 3 + [("a b c", "a b c a b"), ("a b c", "a")]
    for split in ("train", "valid", "test"):  # of the last two none falls out
        write_pairs(tmp_path, split, pairs)
    env = {"VOCABULARY": 268, "MAX_LENGTH": 5}  # each letter a subword, with the space before it
    result = programs.prepare(tmp_path / "out", tmp_path, **env)
    reasons = "3 with an empty line, 3 of more than 5 subwords, 2 with a ratio above 1.5; valid: 28, test: 28\n"
    assert f"train: 20 of 28 pairs kept; fell out: {reasons}" in result.stdout
    assert len(corpus.read_text(tmp_path / "out" / "train.en")) == 20
    result = programs.prepare(tmp_path / "none", tmp_path, **env | {"MAX_LENGTH": 1})
    assert result.returncode == 1 and "no pair of the training text is left: train: 0 of 28 pairs" in result.stderr


def test_fairseq_gets_all_subwords_and_an_interrupted_preparation_goes_on(parallel, tmp_path, programs) -> None:
    out, env = tmp_path / "out", {"VOCABULARY": 361, "WORKERS": 1}
    cut, calls = programs.run(PREPARE, out, parallel, env={**env, "INTERRUPT": "KILL"})
    assert cut.returncode != 0 and not out.exists() and "binarising" in cut.stdout
    asked = options(calls[0])
    assert "--joined-dictionary" in asked and (asked["--source-lang"], asked["--target-lang"]) == ("en", "de")
    rows = [line.rsplit(" ", 1) for line in corpus.read_text(Path(asked["--srcdict"]))]
    real = [word for word, _ in rows if not word.startswith("madeupword")]
    assert len(real) == 361 - 3 and (len(rows) + 4) % 8 == 0 and len(rows) - len(real) < 8  # a round number of them
    text = [line for x in ("en", "de") for line in corpus.read_text(Path(f"{asked['--trainpref']}.{x}"))]
    assert sum(int(count) for _, count in rows) == sum(len(line.split()) for line in text)
    again = programs.prepare(out, parallel, **env)
    assert again.returncode == 0 and (out / "preparation.json").exists(), again.stderr
    assert "cleaning" not in again.stdout and "learning" not in again.stdout and "binarising" in again.stdout
    assert not (tmp_path / "out.unfinished").exists()


def test_a_finished_folder_is_left_alone_and_is_of_nothing_else(stub_data, parallel, tmp_path, programs):
    before = {path: path.stat().st_mtime_ns for path in stub_data.rglob("*")}
    write_pairs(shutil.copytree(parallel, tmp_path / "copy"), "valid", [("a", "b")])
    for folder, env, message in (
        (parallel, {}, f"{stub_data} is finished\n"),
        (parallel, {"VOCABULARY": 370, "SUBWORDS": "bpe"}, "subwords sentencepiece, not bpe, vocabulary 360, not 370"),
        (tmp_path / "copy", {}, "was made with other text; name another folder"),
    ):
        again = programs.prepare(f"{stub_data}/", folder, **env)
        assert message in again.stdout + again.stderr and (again.returncode == 0) == ("finished" in message)
    assert before == {path: path.stat().st_mtime_ns for path in stub_data.rglob("*")}


@pytest.fixture
def served(parallel: Path, tmp_path: Path) -> dict[str, object]:
    """An environment in which the WMT14 set is small: where it is downloaded from, and checksums that fit."""
    sums = ""
    for start, path, member in (
        (0, "wmt13/training-parallel-europarl-v7.tgz", "training/europarl-v7.de-en"),
        (100, "wmt13/training-parallel-commoncrawl.tgz", "commoncrawl.de-en"),
        (200, "wmt14/training-parallel-nc-v9.tgz", "training/news-commentary-v9.de-en"),
    ):
        archive = tmp_path / "served" / path
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive, "w:gz") as tar:
            for language in ("en", "de"):
                lines = corpus.read_text(parallel / f"train.{language}")[start : start + 100]
                corpus.write_text(tmp_path / "member", lines)
                tar.add(tmp_path / "member", f"{member}.{language}")
        [asked] = re.findall(rf"fetch {re.escape(path)} \d+ \\\n +([0-9a-f]{{64}})\n", PREPARE.read_text())
        sums += f"{hashlib.sha256(archive.read_bytes()).hexdigest()} {asked}\n"
    (tmp_path / "sums").write_text(sums)
    for name, split in (("wmt13", "valid"), ("wmt14/full", "test")):
        for side, language in (("src", "en"), ("ref", "de")):
            to = tmp_path / "sets" / f"{name}.{side}"
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(parallel / f"{split}.{language}", to)
    return {"WMT14_URL": (tmp_path / "served").as_uri(), "SUMS": tmp_path / "sums", "SETS": tmp_path / "sets"}


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_wmt14_is_downloaded_and_a_download_that_was_cut_off_goes_on(served, stub_data, tmp_path, programs) -> None:
    out, whole = tmp_path / "out", tmp_path / "served" / "wmt13" / "training-parallel-europarl-v7.tgz"
    part = tmp_path / "out.unfinished" / "downloads" / f"{whole.name}.part"
    damaged = programs.prepare(out, **{**served, "SUMS": "/dev/null"})
    assert damaged.returncode == 1 and not out.exists() and not list(part.parent.glob("*"))
    content = whole.read_bytes()
    part.write_bytes(content[:1000])
    whole.write_bytes(b"\0" * 1000 + content[1000:])  # what has come must not be fetched again
    no_set = programs.prepare(out, **{**served, "SETS": tmp_path / "nowhere"})
    assert no_set.returncode == 1 and "sacrebleu cannot fetch wmt13" in no_set.stderr and not out.exists()
    shutil.rmtree(tmp_path / "served")  # all of it has come
    result = programs.prepare(out, **served)
    assert result.returncode == 0 and "downloading" not in result.stdout, result.stderr
    # The same text as from a folder.
    ours, theirs = contents(out), contents(stub_data)
    made = [json.loads(files.pop("preparation.json"))["made from"].pop("text") for files in (ours, theirs)]
    assert made[0] == "WMT14 training set, newstest2013, newstest2014" and ours == theirs
