"""The scripts of examples/wmt14: each does what it says, and no flag in it has rotted.

Most tests have programs in fairseq's place that note how they were called. The slow ones run fairseq, on a corpus of a
few hundred pairs: the options at a call's end override what the scripts set.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from .conftest import ROOT, options, run_script

WMT14 = ROOT / "examples" / "wmt14"
PREPARE, GENERATE, MULTI30K = WMT14 / "prepare.sh", WMT14 / "generate.sh", WMT14 / "multi30k.sh"
SUMMARIZE = WMT14 / "summarize.py"
ROWS = {row.stem: row for row in sorted((WMT14 / "table1").glob("*.sh"))}

sys.path.append(str(WMT14))  # as when one of its programs is started
corpus, preparation, score, subwords = map(import_module, ("corpus", "preparation", "score", "subwords"))
PAPER: dict[str, tuple[float, float]] = runpy.run_path(str(SUMMARIZE))["PAPER"]

TINY_MODEL = (
    "--encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 32 --decoder-embed-dim 32 --encoder-ffn-embed-dim 32"
    " --decoder-ffn-embed-dim 32 --encoder-attention-heads 2 --decoder-attention-heads 2"
).split()
TINY_TRAINING = "--cpu --num-workers 0 --max-update 1 --update-freq 1 --max-tokens 256".split()

# fairseq and what it calls, attributed to the line that calls fairseq.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

LEXICON = [
    ("the", "die"), ("well-known", "wohl-bekannte"), ("café", "Kaffeehaus"), ("state-of-the-art", "hoch-moderne"),
    ("costs", "kostet"), ("12.50", "12,50"), ("€", "€"), ("naïve", "naive"), ("“ideas”", "„Ideen“"), ("and", "und"),
    ("green", "grüne"), ("dogs", "Hunde"), ("don't", "nicht"), ("sleep", "schlafen"), ("& more", "& mehr"),
    ("(often)", "(oft)"), ("furiously", "wütend"), ("Straße", "Straße"), ("–", "–"), ("a/b", "a/b"),
]  # fmt: skip
TEST = [
    ("the green dogs sleep.", "die grüne Hunde schlafen."),
    ("", "nichts"),
    ("the 日本 café\u2028costs 12.50 €!", "die 日本 Kaffeehaus kostet 12,50 €!"),
    ("a well-known\tstate-of-the-art café.", "die wohl-bekannte hoch-moderne Kaffeehaus."),
]


def draw_pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """Sentences and their translations, word by word."""
    draw = random.Random(seed)
    pairs = []
    for _ in range(count):
        words, end = draw.choices(LEXICON, k=draw.randint(2, 8)), draw.choice(".!?")
        pairs.append((" ".join(w[0] for w in words) + end, " ".join(w[1] for w in words) + end))
    return pairs


def write_pairs(folder: Path, split: str, pairs: list[tuple[str, str]]) -> None:
    for language, lines in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
        text = "".join(f"{line}\n" for line in lines)
        (folder / f"{split}.{language}").write_text(text, encoding="utf-8", newline="\n")


@pytest.fixture(scope="session")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A FOLDER for prepare.sh; the second line of its test set is empty, and one has a line end of Unicode's in it."""
    folder = tmp_path_factory.mktemp("parallel")
    write_pairs(folder, "train", draw_pairs(300, 1))
    write_pairs(folder, "valid", draw_pairs(6, 2))
    write_pairs(folder, "test", TEST)
    return folder


# --- programs in fairseq's place

STUBS = {
    "fairseq-train": """
        touch "$save/checkpoint_last.pt" "$save/checkpoint_best.pt"
        echo "training fails"; exit "${TRAIN_FAILS:-0}"
    """,
    "fairseq-generate": 'cat "${GENERATED:-/dev/null}"; exit "${GENERATE_FAILS:-0}"',
    # What it is given is what it leaves.
    "fairseq-preprocess": """
        mkdir -p "$dest"
        for split in train valid test; do cp "$encoded/$split".?? "$dest"; done
        [ -z "${INTERRUPT:-}" ] || { kill -"$INTERRUPT" $PPID; sleep 0.5; exit 1; }
    """,
    "sacrebleu": 'cat "$SETS/$2.$6" 2> /dev/null || { echo "no such set"; exit 1; }',
    # The first 64 characters of what comes to pass for a checksum are in $SUMS beside the real one.
    "sha256sum": 'sum=$(/usr/bin/sha256sum | cut -d " " -f 1); grep "^$sum" "$SUMS" | cut -d " " -f 2 || echo "$sum"',
}
OPTIONS = """
arguments=("$@")
for i in "${!arguments[@]}"; do
    case ${arguments[i]} in
        --save-dir) save=${arguments[i + 1]} ;;
        --destdir) dest=${arguments[i + 1]} ;;
        --trainpref) encoded=$(dirname "${arguments[i + 1]}") ;;
    esac
done
"""


class Programs:
    """Runs scripts with programs that note how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name, body in STUBS.items():
            note = 'printf "%s\\0" "${0##*/}" "$@" > "$CALLS/$(date +%s%N)"'
            (folder / name).write_text(f"#!/bin/bash\n{note}\n{OPTIONS}\n{body}\n")
            (folder / name).chmod(0o755)

    def run(
        self, script: Path, *arguments: object, env: Mapping[str, object] | None = None
    ) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
        """The result, and the calls in their order."""
        calls = self.folder / "calls"
        calls.mkdir()
        path = [str(self.folder), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        variables = {"PATH": os.pathsep.join(path), "CALLS": str(calls), "SUMS": "/dev/null", **(env or {})}
        try:
            result = subprocess.run(
                ["bash", str(script), *map(str, arguments)],
                cwd=ROOT,
                env={**os.environ, **{name: str(value) for name, value in variables.items()}},
                capture_output=True,
                text=True,
            )
            return result, [call.read_text().rstrip("\0").split("\0") for call in sorted(calls.iterdir())]
        finally:
            shutil.rmtree(calls)

    def prepare(self, *arguments: object, **env: object) -> subprocess.CompletedProcess[str]:
        """prepare.sh with a vocabulary for small texts, unless `env` has another."""
        return self.run(PREPARE, *arguments, env={"VOCABULARY": 360, "WORKERS": 1, **env})[0]


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path / "programs")


@pytest.fixture(scope="session")
def stub_data(parallel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`parallel` as prepare.sh leaves it, but not binarised."""
    out = tmp_path_factory.mktemp("stub_data") / "data"
    result = Programs(out.with_name("programs")).prepare(out, parallel)
    assert result.returncode == 0, result.stderr
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# --- the text


@pytest.mark.parametrize(
    "raw, line",
    [
        ("  a\tb  c ", "a b c"),
        ("a\u2028b\u00a0c\u3000d\x85e", "a b c d e"),
        ("\ufeffa\x00b\x1fc", "a b c"),
        (" \u2003\x0b", ""),
        ("naïve – „日本“ & <b>", "naïve – „日本“ & <b>"),
    ],
)
def test_a_clean_line_has_single_spaces_and_no_control_characters(raw: str, line: str) -> None:
    assert corpus.clean(raw) == line


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("a\x0bb\u2028c\rd\x85e\r\n\nend".encode())
    assert corpus.read_text(tmp_path / "text") == ["a\x0bb\u2028c\rd\x85e", "", "end"]


def test_text_is_known_by_its_content_compressed_or_not(parallel: Path, tmp_path: Path) -> None:
    whole = corpus.survey(parallel, "en", "de")
    shutil.copytree(parallel, tmp_path / "copy")
    for name in ("train.en", "test.de"):
        file = tmp_path / "copy" / name
        file.with_name(f"{name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    again = corpus.survey(tmp_path / "copy", "en", "de")
    assert again.digest == whole.digest and again.pairs == {"train": 300, "valid": 6, "test": 4}
    assert list(again.read("train", "en")) == list(whole.read("train", "en"))
    assert corpus.survey(parallel, "de", "en").digest != whole.digest
    with (tmp_path / "copy" / "valid.de").open("a") as file:
        file.write("x\n")
    with (tmp_path / "copy" / "valid.en").open("a") as file:
        file.write("x\n")
    assert corpus.survey(tmp_path / "copy", "en", "de").digest != whole.digest


def damage(name: str, content: bytes | None) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink() if content is None else (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    "harm, message",
    [
        (damage("valid.de", None), "holds neither valid.de nor valid.de.gz"),
        (damage("valid.de.gz", b""), "holds both valid.de and valid.de.gz; one of them must go"),
        (damage("test.en", b""), "test.en is empty"),
        (damage("train.en", b"a\nb\n"), r"train\.en has 2 lines and .*/train\.de has 300"),
        (damage("valid.en", b"a\n\n c\xff\n"), "valid.en, line 3: not UTF-8, byte 3 of the line is 0xff"),
        (shutil.rmtree, "there is no folder"),
    ],
    ids=["missing", "twice", "empty", "unequal", "not UTF-8", "no folder"],
)
def test_text_that_is_not_right_is_refused_and_nothing_is_made(
    harm: Callable[[Path], object], message: str, parallel: Path, tmp_path: Path, programs: Programs
) -> None:
    shutil.copytree(parallel, tmp_path / "copy")
    harm(tmp_path / "copy")
    result = programs.prepare(tmp_path / "out", tmp_path / "copy")
    assert result.returncode == 1 and re.search(message, result.stderr), result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.unfinished").exists()


def test_a_gzip_file_that_was_cut_off_is_refused(parallel: Path, tmp_path: Path) -> None:
    packed = gzip.compress((parallel / "train.en").read_bytes())
    (tmp_path / "train.en.gz").write_bytes(packed[:-20])
    with pytest.raises(corpus.CorpusError, match=r"train\.en\.gz is no whole gzip file"):
        list(corpus.read_lines(tmp_path / "train.en.gz"))


# --- subwords


@pytest.fixture(scope="module")
def pieces(parallel: Path) -> Any:
    lines = corpus.read_text(parallel / "train.en") + corpus.read_text(parallel / "train.de")
    return subwords.SentencePieces(subwords.SentencePieces.learn(lines, 360))


@pytest.fixture(scope="module")
def codes(parallel: Path) -> bytes:
    lines = corpus.read_text(parallel / "train.en") + corpus.read_text(parallel / "train.de")
    return subwords.MosesBpe.learn(subwords.prepare_lines("bpe", "de", lines), 60)


@pytest.mark.parametrize("line", ["", "Straße – „Ideen“!", "日本 ½ ﬁ 😀 <unk> <s> <0xE2>", "a-b c--d @-@ & &amp;"])
def test_sentencepieces_give_back_what_they_cut_to_the_letter(line: str, pieces: Any) -> None:
    (cut,) = pieces.encode([line])
    assert set(cut.split()) <= set(pieces.dictionary)
    assert pieces.decode(cut) == line


def test_a_decoded_line_is_one_line(pieces: Any) -> None:
    assert pieces.decode("▁die <0x0A> ▁ <0xE2> <0x80> <0xA8> x").splitlines() == ["die x"]


@pytest.mark.parametrize(
    "line", ["", "grüne Hunde (oft) schlafen!", "hoch-moderne Straße & mehr: 12,50 €", 'er "sagt" a']
)
def test_moses_tokens_and_merges_are_undone(line: str, codes: bytes) -> None:
    bpe = subwords.MosesBpe(codes, "de")
    tokens = subwords.prepare_lines("bpe", "de", [line])
    (cut,) = bpe.encode(tokens)
    assert "@@" in cut or not line
    assert bpe.decode(cut) == line
    assert ("@-@" in tokens[0]) == ("-" in line)


@pytest.mark.parametrize(
    "env, message",
    [
        ({"VOCABULARY": 100_000}, r"VOCABULARY is 100000; this text gives at most \d+ subwords"),
        ({"VOCABULARY": 40}, r"VOCABULARY is 40; it must be at least \d+, for the text's characters and bytes"),
        ({"VOCABULARY": 100_000, "SUBWORDS": "bpe"}, r"VOCABULARY is 100000; this text gives at most \d+ merges"),
    ],
)
def test_a_vocabulary_that_the_text_cannot_give_is_refused_and_the_possible_one_works(
    env: dict[str, object], message: str, parallel: Path, tmp_path: Path, programs: Programs
) -> None:
    result = programs.prepare(tmp_path / "out", parallel, **env)
    assert result.returncode == 1 and re.search(message, result.stderr), result.stderr
    assert len(result.stderr.splitlines()) == 1 and not (tmp_path / "out").exists()
    possible = int(re.findall(r"\d+", result.stderr.split(";")[1])[0])
    again = programs.prepare(tmp_path / "out", parallel, **{**env, "VOCABULARY": possible})
    assert again.returncode == 0 and "cleaning" not in again.stdout, again.stderr


# --- prepare.sh


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


def test_the_same_text_gives_the_same_bytes_in_several_processes_too(
    parallel: Path, tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.pathsep.join([str(programs.folder), os.environ["PATH"]]))
    monkeypatch.setenv("CALLS", str(tmp_path))
    common = [str(parallel), "--subwords", "bpe", "--vocabulary", "60"]
    assert preparation.main([str(tmp_path / "one"), *common]) == 0
    monkeypatch.setattr(preparation, "CHUNK", 70)
    assert preparation.main([str(tmp_path / "two"), *common, "--workers", "2"]) == 0
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


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


def test_stages_that_other_settings_leave_as_they_are_are_not_done_again(
    parallel: Path, tmp_path: Path, programs: Programs
) -> None:
    out = tmp_path / "out"
    programs.prepare(out, parallel, INTERRUPT="KILL")
    other = programs.prepare(out, parallel, INTERRUPT="KILL", VOCABULARY=370)
    assert "cleaning" not in other.stdout and "learning" in other.stdout
    stages = sorted(path.name.split("-")[0] for path in (tmp_path / "out.unfinished").iterdir())
    assert stages == ["encoded", "finished", "subwords", "text"]  # none of them twice
    last = programs.prepare(out, parallel, VOCABULARY=370, MAX_RATIO=2)
    assert "learning" not in last.stdout and "cutting" in last.stdout
    assert json.loads((out / "preparation.json").read_text())["made from"]["max_ratio"] == 2


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


def test_a_folder_with_something_else_in_it_is_not_written_to(
    parallel: Path, tmp_path: Path, programs: Programs
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    result = programs.prepare(tmp_path / "out", parallel)
    assert result.returncode == 1 and "is there, but is not what this script makes" in result.stderr
    (tmp_path / "out" / "mine").unlink()
    assert programs.prepare(tmp_path / "out", parallel).returncode == 0


def test_other_languages_are_taken_from_a_folder(parallel: Path, tmp_path: Path, programs: Programs) -> None:
    folder = tmp_path / "fr"
    folder.mkdir()
    for path in parallel.iterdir():
        shutil.copy(path, folder / path.name.replace(".en", ".fr"))
    assert programs.prepare(tmp_path / "out", folder, SRC="de", TGT="fr").returncode == 0
    made = json.loads((tmp_path / "out" / "preparation.json").read_text())["made from"]
    assert (made["source"], made["target"]) == ("de", "fr")


# --- the download

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


@pytest.fixture
def served(parallel: Path, tmp_path: Path) -> dict[str, object]:
    """An environment in which the WMT14 set is small: where it is downloaded from, and checksums that fit."""
    archives = {
        "wmt13/training-parallel-europarl-v7.tgz": ("training/europarl-v7.de-en", slice(0, 100)),
        "wmt13/training-parallel-commoncrawl.tgz": ("commoncrawl.de-en", slice(100, 200)),
        "wmt14/training-parallel-nc-v9.tgz": ("training/news-commentary-v9.de-en", slice(200, 300)),
    }
    script = PREPARE.read_text()
    sums = []
    for path, (member, part) in archives.items():
        archive = tmp_path / "served" / path
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive, "w:gz") as tar:
            for language in ("en", "de"):
                text = tmp_path / "member"
                text.write_text("".join(f"{x}\n" for x in corpus.read_text(parallel / f"train.{language}")[part]))
                tar.add(text, f"{member}.{language}")
        asked = re.search(rf"fetch {re.escape(path)} \d+ \\\n +([0-9a-f]{{64}})\n", script)
        assert asked is not None
        sums.append(f"{hashlib.sha256(archive.read_bytes()).hexdigest()} {asked[1]}\n")
    (tmp_path / "sums").write_text("".join(sums))
    for name, split in (("wmt13", "valid"), ("wmt14/full", "test")):
        for side, language in (("src", "en"), ("ref", "de")):
            (tmp_path / "sets" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(parallel / f"{split}.{language}", tmp_path / "sets" / f"{name}.{side}")
    url = (tmp_path / "served").as_uri()
    return {"WMT14_URL": url, "SUMS": tmp_path / "sums", "SETS": tmp_path / "sets"}


@needs_curl
def test_wmt14_is_downloaded_and_a_download_that_was_cut_off_goes_on(
    served: dict[str, object], stub_data: Path, tmp_path: Path, programs: Programs
) -> None:
    out, whole = tmp_path / "out", tmp_path / "served" / "wmt13" / "training-parallel-europarl-v7.tgz"
    gone = programs.prepare(out, **{**served, "WMT14_URL": (tmp_path / "nowhere").as_uri()})
    assert gone.returncode == 1 and "cannot download" in gone.stderr and not out.exists()
    part = tmp_path / "out.unfinished" / "downloads" / f"{whole.name}.part"
    part.parent.mkdir(parents=True, exist_ok=True)
    content = whole.read_bytes()
    part.write_bytes(content[:1000])
    whole.write_bytes(b"\0" * 1000 + content[1000:])  # what has come must not be fetched again
    no_set = programs.prepare(out, **{**served, "SETS": tmp_path / "nowhere"})
    assert no_set.returncode == 1 and "sacrebleu cannot fetch wmt13" in no_set.stderr and not out.exists()
    assert (part.parent / whole.name).read_bytes() == content
    shutil.rmtree(tmp_path / "served")  # all of it has come
    result = programs.prepare(out, **served)
    assert result.returncode == 0 and "downloading" not in result.stdout, result.stderr
    assert not (tmp_path / "out.unfinished").exists()
    # The same text as from a folder.
    ours, theirs = contents(out), contents(stub_data)
    made = [json.loads(files.pop("preparation.json"))["made from"].pop("text") for files in (ours, theirs)]
    assert made[0] == "WMT14 training set, newstest2013, newstest2014" and ours == theirs
    again = programs.prepare(out, **served)
    assert again.returncode == 0 and again.stdout == f"{out} is finished\n"


@needs_curl
def test_downloads_can_be_kept(served: dict[str, object], tmp_path: Path, programs: Programs) -> None:
    result = programs.prepare(tmp_path / "out", **served, DOWNLOADS=tmp_path / "kept", SRC="de", TGT="en")
    assert result.returncode == 0 and not (tmp_path / "out.unfinished").exists(), result.stderr
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [
        f"training-parallel-{name}.tgz" for name in ("commoncrawl", "europarl-v7", "nc-v9")
    ]


@needs_curl
def test_a_damaged_download_is_deleted_and_the_others_are_kept(
    served: dict[str, object], tmp_path: Path, programs: Programs
) -> None:
    (tmp_path / "served" / "wmt13" / "training-parallel-commoncrawl.tgz").write_bytes(b"<html>moved</html>")
    result = programs.prepare(tmp_path / "out", **served)
    assert result.returncode == 1 and "commoncrawl.tgz is damaged and was deleted; run it again" in result.stderr
    assert not (tmp_path / "out").exists()
    downloads = tmp_path / "out.unfinished" / "downloads"
    assert [path.name for path in downloads.iterdir()] == ["training-parallel-europarl-v7.tgz"]


# --- the rows of Table 1


def test_there_is_a_script_for_each_row_of_the_table() -> None:
    assert sorted(ROWS) == sorted(PAPER)
    assert all(os.access(row, os.X_OK) for row in ROWS.values())


@pytest.mark.parametrize("name", ROWS)
def test_a_row_has_the_settings_of_the_paper(name: str, stub_data: Path, tmp_path: Path, programs: Programs) -> None:
    result, (train,) = programs.run(ROWS[name], "train", stub_data, tmp_path / "out")
    assert result.returncode == 0, result.stderr
    asked = options(train)
    assert {key: asked[key] for key in asked if key in (
        "--fast-weight-attention", "--update-rule", "--feature-map", "--normalization", "--favor-features", "--dpfp-nu"
    )} == {
        "standard": {"--fast-weight-attention": "none"},
        "linear": {"--feature-map": "elu"},
        # Table 6, and d_dot = 2 m or 2 nu d_key with d_key = 64.
        "performer-64": {"--feature-map": "favor", "--favor-features": "32"},
        "performer-256": {"--feature-map": "favor", "--favor-features": "128"},
        "performer-512": {"--feature-map": "favor", "--favor-features": "256"},
        "dpfp-256": {"--feature-map": "dpfp", "--dpfp-nu": "2"},
        "dpfp-512": {"--feature-map": "dpfp", "--dpfp-nu": "4"},
    }[name] | ({} if name == "standard" else {
        "--fast-weight-attention": "encoder,decoder,cross", "--update-rule": "sum", "--normalization": "attention",
    })  # fmt: skip
    paper = {
        "--arch": "fast_weight_transformer_wmt_en_de_big", "--task": "translation", "--share-all-embeddings": "",
        "--optimizer": "adam", "--adam-betas": "(0.9, 0.98)", "--clip-norm": "0", "--weight-decay": "0",
        "--lr": "0.0005", "--lr-scheduler": "inverse_sqrt", "--warmup-updates": "4000", "--warmup-init-lr": "1e-07",
        "--dropout": "0.3", "--criterion": "label_smoothed_cross_entropy", "--label-smoothing": "0.1",
        "--max-tokens": "3584", "--max-epoch": "45",
        "--eval-bleu-remove-bpe": "sentencepiece", "--best-checkpoint-metric": "bleu",
    }  # fmt: skip
    assert {key: asked[key] for key in paper} == paper
    assert "--maximize-best-checkpoint-metric" in asked and "--eval-bleu" in asked
    assert json.loads(asked["--eval-bleu-args"]).items() >= {"beam": 4, "lenpen": 0.6}.items()
    assert f"BLEU {PAPER[name][0]} (valid), {PAPER[name][1]} (test) in the paper." in ROWS[name].read_text()


@pytest.mark.parametrize(
    "env, expected",
    [
        ({}, ("1", "48", "3584")),
        ({"GPUS": "3"}, ("3", "16", "3584")),
        ({"GPUS": "8"}, ("8", "6", "3584")),
        ({"UPDATE_FREQ": "8"}, ("1", "8", "21504")),
        ({"GPUS": "7", "UPDATE_FREQ": "4"}, ("7", "4", "6144")),
    ],
)
def test_the_batch_is_divided_among_gpus_and_accumulated_batches(
    env: dict[str, str], expected: tuple[str, str, str], stub_data: Path, tmp_path: Path, programs: Programs
) -> None:
    _, (train,) = programs.run(ROWS["linear"], "train", stub_data, tmp_path / "out", env=env)
    asked = options(train)
    assert (asked["--distributed-world-size"], asked["--update-freq"], asked["--max-tokens"]) == expected
    assert expected[0] != "3" or expected == ("3", "16", "3584")  # the paper's own
    product = 1
    for factor in expected:
        product *= int(factor)
    assert product == 3 * 16 * 3584


def test_options_at_the_end_of_a_call_override_the_script(stub_data: Path, tmp_path: Path, programs: Programs) -> None:
    call = ["train", stub_data, tmp_path / "out", "--fp16", "--lr", "0.001", "--cpu"]
    _, (train,) = programs.run(ROWS["linear"], *call)
    assert options(train)["--lr"] == "0.001" and train[-4:] == ["--fp16", "--lr", "0.001", "--cpu"]


@pytest.mark.parametrize(
    "script, arguments, env, message",
    [
        (ROWS["linear"], ["learn", "DATA", "OUT"], {}, "ROW.sh train DATA OUT"),
        (ROWS["linear"], ["train", "DATA"], {}, "ROW.sh train DATA OUT"),
        (ROWS["linear"], ["train", "nowhere", "OUT"], {}, "DATA is nowhere, which holds no preparation.json"),
        (ROWS["linear"], ["generate", "nowhere", "OUT"], {}, "DATA is nowhere, which holds no preparation.json"),
        (ROWS["linear"], ["generate", "DATA", "OUT"], {}, "OUT, which holds no checkpoint_best.pt"),
        (ROWS["linear"], ["train", "DATA", "OUT"], {"GPUS": "two"}, "GPUS is two; it must be a positive number"),
        (ROWS["linear"], ["train", "DATA", "OUT"], {"GPUS": "5"}, "GPUS is 5; it must divide 48, or UPDATE_FREQ must"),
        (ROWS["linear"], ["train", "DATA", "OUT"], {"UPDATE_FREQ": "0"}, "UPDATE_FREQ is 0; it must be a positive"),
        (ROWS["linear"], ["train", "DATA", "OUT"], {"UPDATE_FREQ": "5"}, "it must divide the batch of 172032 tokens"),
        (GENERATE, ["DATA"], {}, "generate.sh DATA OUT [OPTION ...]"),
        (GENERATE, ["DATA", "MODEL", "--quiet"], {}, "OPTION is --quiet; it must not be given"),
        (GENERATE, ["DATA", "MODEL", "--remove-bpe=subword_nmt"], {}, "OPTION is --remove-bpe=subword_nmt"),
        (GENERATE, ["DATA", "MODEL", "--gen-subset", "test"], {}, "OPTION is --gen-subset; set SUBSETS"),
        (GENERATE, ["DATA", "MODEL"], {"SUBSETS": "test2"}, "SUBSETS is test2; it must be valid, test or both"),
        (MULTI30K, ["DATA"], {}, "multi30k.sh DATA OUT [MODEL ...]"),
        (MULTI30K, ["nowhere", "OUT"], {}, "DATA is nowhere, which holds no preparation.json"),
        (MULTI30K, ["DATA", "OUT", "gamma"], {}, "MODEL is gamma; it must be one of softmax linear favor dpfp"),
        (MULTI30K, ["DATA", "OUT"], {"UPDATES": "many"}, "UPDATES is many and JOBS 2; they must be positive numbers"),
        (MULTI30K, ["DATA", "OUT", "linear"], {"DEVICE": "abacus"}, "DEVICE is abacus; it must be cpu or gpu"),
        (PREPARE, [], {}, "prepare.sh OUT [FOLDER]"),
        (PREPARE, ["OUT"], {"TGT": "fr"}, "SRC is en and TGT fr; without FOLDER they must be en and de"),
        (PREPARE, ["OUT", "TEXT"], {"TGT": "en"}, "source and target are both en"),
        (PREPARE, ["OUT", "TEXT"], {"SRC": "../x"}, "SRC is '../x'; it must be the short name of a language"),
        (PREPARE, ["OUT", "TEXT"], {"SUBWORDS": "letters"}, "SUBWORDS is letters; it must be sentencepiece or bpe"),
        (
            PREPARE,
            ["OUT", "TEXT"],
            {"VOCABULARY": "32k"},
            "VOCABULARY is '32k'; it must be a whole number of at least 1",
        ),
        (PREPARE, ["OUT"], {"MAX_LENGTH": "0"}, "MAX_LENGTH is '0'; it must be a whole number of at least 1"),
        (PREPARE, ["OUT", "TEXT"], {"MAX_RATIO": "nan"}, "MAX_RATIO is 'nan'; it must be a number of at least 1"),
        (PREPARE, ["OUT", "TEXT"], {"WORKERS": "-1"}, "WORKERS is '-1'; it must be a whole number of at least 1"),
    ],
)
def test_wrong_use_is_refused_and_leaves_nothing_behind(
    script: Path, arguments: list[str], env: dict[str, str], message: str, stub_data: Path, parallel: Path,
    tmp_path: Path, programs: Programs,
) -> None:  # fmt: skip
    (tmp_path / "MODEL").mkdir()
    (tmp_path / "MODEL" / "checkpoint_best.pt").touch()
    places = {"DATA": stub_data, "TEXT": parallel, "OUT": tmp_path / "OUT", "MODEL": tmp_path / "MODEL"}
    result, calls = programs.run(script, *(places.get(word, word) for word in arguments), env=env)
    assert result.returncode != 0 and message in result.stderr
    assert not calls and not (tmp_path / "OUT").exists() and not (tmp_path / "OUT.unfinished").exists()
    assert len(list((tmp_path / "MODEL").iterdir())) == 1


# --- generate.sh

SUMMARY = (
    "2026-01-01 | INFO | fairseq_cli.generate | Translated 4 sentences (1,234 tokens) in 2.5s (1.60 sentences/s, "
    "493.60 tokens/s)\n"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with what generate.sh takes for a trained model."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "checkpoint_best.pt").touch()
    return tmp_path / "model"


@pytest.fixture
def hypotheses(stub_data: Path) -> list[str]:
    """What fairseq-generate would say of the test set, in an order of its own; a translation without a fault."""
    cut = corpus.read_text(stub_data / "test.de")
    lines = []
    for number in (2, 0, 3, 1):
        text = cut[number] if number != 1 else ""
        lines += [f"S-{number}\tx\n", f"T-{number}\t{cut[number]}\n", f"H-{number}\t-0.5\t{text}\n"]
        lines += [f"D-{number}\t-0.5\t{text}\n", f"P-{number}\t-0.5\n", f"H-{number}\t-0.9\tworse\n"]
    return lines


def generate(
    programs: Programs, data: Path, model: Path, lines: list[str], *arguments: str
) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """generate.sh for the test set, if fairseq-generate logs these lines."""
    log = programs.folder / "log"
    log.write_text("".join(lines), encoding="utf-8")
    return programs.run(GENERATE, data, model, *arguments, env={"SUBSETS": "test", "GENERATED": log})


def test_translations_come_in_the_order_of_the_test_set_with_a_line_for_an_empty_source(
    stub_data: Path, model: Path, hypotheses: list[str], programs: Programs
) -> None:
    result, (call,) = generate(programs, stub_data, model, [*hypotheses, SUMMARY], "--cpu", "--beam", "8")
    assert result.returncode == 0, result.stderr
    raw = corpus.read_text(stub_data / "raw" / "test.de")
    assert corpus.read_text(model / "generate-test.hyp") == [raw[0], "", corpus.clean(raw[2]), raw[3]]
    assert (model / "generate-test.log").read_text() == "".join([*hypotheses, SUMMARY])
    values = json.loads((model / "generate-test.json").read_text())
    assert values["signature"] in result.stdout and "|tok:13a|" in values["signature"]
    assert "|tok:none|" in values["compound_split_signature"]
    assert 90 < values["bleu"] < 100 and 90 < values["compound_split_bleu"] < 100  # a line is lacking
    expected = {"sentences": 4, "skipped": 0, "tokens": 1234, "seconds": 2.5, "tokens_per_second": 493.6}
    assert {key: values[key] for key in expected} == expected
    asked = options(call)
    assert (asked["--beam"], asked["--lenpen"], asked["--gen-subset"]) == ("8", "0.6", "test")
    assert asked["--distributed-world-size"] == "1" and asked["--path"] == str(model / "checkpoint_best.pt")
    assert values["options"] == "--beam 4 --lenpen 0.6 --max-len-a 1 --max-len-b 50 --cpu --beam 8".split()
    assert values["data"]["vocabulary"] == 360
    assert not list(model.glob("*.unfinished"))


def test_both_sets_are_translated_unless_one_is_asked_for(stub_data: Path, model: Path, programs: Programs) -> None:
    lines = [f"H-{number}\t-1\t▁die\n" for number in range(6)]
    (programs.folder / "log").write_text("".join([*lines, SUMMARY]))
    result, calls = programs.run(GENERATE, stub_data, model, env={"GENERATED": programs.folder / "log"})
    assert result.returncode == 0, result.stderr
    assert [options(call)["--gen-subset"] for call in calls] == ["valid", "test"]
    assert [len(corpus.read_text(model / f"generate-{name}.hyp")) for name in ("valid", "test")] == [6, 4]


def test_a_result_that_is_there_is_kept_and_not_passed_off_as_one_of_other_options(
    stub_data: Path, model: Path, hypotheses: list[str], programs: Programs
) -> None:
    generate(programs, stub_data, model, [*hypotheses, SUMMARY])
    before = contents(model)
    again, calls = generate(programs, stub_data, model, ["other"])
    assert again.returncode == 0 and not calls and "test: BLEU" in again.stdout and "newer" not in again.stdout
    other, calls = generate(programs, stub_data, model, ["other"], "--beam", "1")
    assert other.returncode == 1 and not calls
    assert "--max-len-b 50, and these are --beam 4" in other.stderr and "delete it to generate again" in other.stderr
    assert contents(model) == before
    os.utime(model / "checkpoint_best.pt", (2e9, 2e9))
    newer, _ = generate(programs, stub_data, model, ["other"])
    assert "the model is newer than" in newer.stdout and contents(model) == before


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda lines: [line for line in lines if "-3" not in line[:4]],
            "lacks 1 of 4 sentences, the first in line 4",
        ),
        (lambda lines: lines[:-1], "ends before fairseq-generate was done"),
    ],
)
def test_a_generation_that_is_not_whole_gives_no_result(
    change: Callable[[list[str]], list[str]], message: str, stub_data: Path, model: Path, hypotheses: list[str],
    programs: Programs,
) -> None:  # fmt: skip
    result, _ = generate(programs, stub_data, model, change([*hypotheses, SUMMARY]))
    assert result.returncode == 1 and message in result.stderr
    assert not list(model.glob("*.json")) and not list(model.glob("*.hyp"))
    again, calls = generate(programs, stub_data, model, [*hypotheses, SUMMARY])
    assert again.returncode == 0 and len(calls) == 1


def test_a_generation_that_fails_shows_why(stub_data: Path, model: Path, programs: Programs) -> None:
    env = {"GENERATE_FAILS": "1", "GENERATED": programs.folder / "log"}
    (programs.folder / "log").write_text("Exception: sample of 2000 words is too long\n")
    result, _ = programs.run(GENERATE, stub_data, model, env=env)
    assert result.returncode == 1 and "is too long" in result.stderr
    assert "generate-valid.log.unfinished says more" in result.stderr and not list(model.glob("*.json"))


def test_sentences_that_fairseq_was_told_to_skip_are_empty_lines_and_counted(
    stub_data: Path, model: Path, hypotheses: list[str], programs: Programs
) -> None:
    lines = [line for line in hypotheses if "-3" not in line[:4]]
    skip = "--skip-invalid-size-inputs-valid-test"
    result, _ = generate(programs, stub_data, model, [*lines, SUMMARY], skip)
    assert result.returncode == 0 and "1 of them skipped and empty" in result.stdout
    assert corpus.read_text(model / "generate-test.hyp")[3] == ""


@pytest.mark.parametrize(
    "line, parts",
    [
        ("a state-of-the-art café", "a state ##AT##-##AT## of ##AT##-##AT## the ##AT##-##AT## art café"),
        ("- a -b c- 1-2", "- a -b c- 1 ##AT##-##AT## 2"),
        ("x-y-z", "x ##AT##-##AT## y-z"),  # as in Perl: y is in the first match
        ("plain", "plain"),
    ],
)
def test_compounds_are_split_at_their_hyphens(line: str, parts: str) -> None:
    assert score.split_compounds(line) == parts


def test_compound_split_bleu_is_of_moses_tokens() -> None:
    assert score.tokenize_and_split(["Die wohl-bekannte Stadt (oft), z.B. heute."], "de") == [
        "Die wohl ##AT##-##AT## bekannte Stadt ( oft ) , z.B. heute ."
    ]
    hypotheses, references = ["das wohl-bekannte Haus ist alt ."], ["das sehr-bekannte Haus ist alt ."]
    values = score.score(hypotheses, references, "de")
    # 13a keeps the compound: 5 of 6 words, 3 of 5 pairs ...; split, there are 7 of 8 words, 5 of 7 pairs ...
    assert values["bleu"] == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)
    assert values["compound_split_bleu"] == pytest.approx(100 * (7 / 8 * 5 / 7 * 4 / 6 * 3 / 5) ** 0.25)


# --- multi30k.sh


@pytest.mark.slow
def test_the_models_of_the_comparison_have_one_budget(stub_data: Path, tmp_path: Path, programs: Programs) -> None:
    (programs.folder / "log").write_text("".join([*(f"H-{n}\t-1\t▁die\n" for n in range(6)), SUMMARY]))
    env = {"GENERATED": programs.folder / "log", "UPDATES": "70", "SUBSETS": "test"}
    result, calls = programs.run(MULTI30K, stub_data, tmp_path / "out", "--", "--lr", "0.1", env=env)
    assert result.returncode == 0, result.stderr
    trainings = {options(call)["--save-dir"]: options(call) for call in calls if call[0] == "fairseq-train"}
    special = {"--save-dir", "--fast-weight-attention", "--feature-map", "--favor-features", "--dpfp-nu"}
    common = [{key: call[key] for key in call if key not in special} for call in trainings.values()]
    assert len(common) == 4 and all(one == common[0] for one in common)
    assert common[0]["--max-update"] == "70" and common[0]["--lr"] == "0.1" and "--cpu" in common[0]
    own = {Path(name).name: {key: call[key] for key in special & set(call)} for name, call in trainings.items()}
    assert [one.pop("--save-dir") for one in own.values()] == list(trainings)
    assert own == {
        "softmax": {"--fast-weight-attention": "none"},
        "linear": {"--feature-map": "elu"},
        "favor": {"--feature-map": "favor", "--favor-features": "64"},
        "dpfp": {"--feature-map": "dpfp", "--dpfp-nu": "2"},
    }
    assert len([call for call in calls if call[0] == "fairseq-generate"]) == 4
    again, calls = programs.run(MULTI30K, stub_data, tmp_path / "out", "--", "--lr", "0.1", env=env)
    assert again.returncode == 0 and not calls and "training" not in again.stdout
    other, calls = programs.run(MULTI30K, stub_data, tmp_path / "out", "linear", env={**env, "UPDATES": "80"})
    assert other.returncode != 0 and not calls and "linear was begun with UPDATES=70 --lr 0.1, and" in other.stderr


def test_a_training_of_the_comparison_that_was_cut_off_goes_on(
    stub_data: Path, tmp_path: Path, programs: Programs
) -> None:
    out = tmp_path / "out"
    cut, calls = programs.run(MULTI30K, stub_data, out, "dpfp", env={"TRAIN_FAILS": "1"})
    assert cut.returncode != 0 and "training fails" in cut.stderr and len(calls) == 1
    again, calls = programs.run(MULTI30K, stub_data, out, "dpfp", env={"DEVICE": "gpu"})
    assert calls[0][0] == "fairseq-train" and (out / "dpfp" / "checkpoint_last.pt").exists()
    assert "--cpu" not in calls[0] and "--cpu" not in calls[1]
    assert (out / "dpfp" / "train.log").read_text().count("training fails") == 2


# --- summarize.py


def write_run(folder: Path, updates: int, finished: bool = True, arch: str = "", **results: float) -> Path:
    """A run as fairseq and generate.sh leave it: a report every 10 updates, a validation every 20."""
    folder.mkdir(parents=True)
    lines = [
        f"fairseq_cli.train | {{'model': Namespace(arch='{arch}', cpu=True)}}",
        "fairseq_cli.train | num. shared model params: 1,234,567 (num. trained: 1,234,567)",
    ]
    for update in range(10, updates + 1, 10):
        lines.append(
            f"train_inner | {json.dumps({'num_updates': str(update), 'ppl': str(900 / update), 'wps': '1000'})}"
        )
        if update % 20 == 0:
            lines.append(f"valid | {json.dumps({'valid_num_updates': str(update), 'valid_ppl': str(999 / update)})}")
    lines += ["fairseq_cli.train | done training in 1.0 seconds"] * finished
    (folder / "train.log").write_text("".join(f"2026-01-01 00:00:00 | INFO | {line}\n" for line in lines))
    for subset, bleu in results.items():
        values = {"bleu": bleu, "signature": "tok:13a", "compound_split_bleu": bleu + 1, "tokens_per_second": 2345.6}
        values |= {"compound_split_signature": "tok:none", "options": ["--beam", "4"]}  # type: ignore[dict-item]
        (folder / f"generate-{subset}.json").write_text(json.dumps(values))
    return folder


def summarize(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SUMMARIZE), *map(str, arguments)], capture_output=True, text=True)


def test_a_summary_has_the_papers_bleu_beside_ours(tmp_path: Path) -> None:
    big = "fast_weight_transformer_wmt_en_de_big"
    write_run(tmp_path / "dpfp-512", 40, arch=big, valid=25.5, test=26.25)
    write_run(tmp_path / "standard", 40, arch=big, valid=25.5, test=27.0)
    write_run(tmp_path / "linear", 20, arch="fast_weight_transformer_multi30k_en_de", valid=33, test=34)
    result = summarize(tmp_path, "--markdown", tmp_path / "t.md", "--figure", tmp_path / "t.png")
    assert not result.stderr and result.stdout == (tmp_path / "t.md").read_text()
    assert result.stdout.splitlines() == [
        "| model | parameters | updates | valid BLEU, paper | valid BLEU | test BLEU, paper | test BLEU | test, "
        "compound-split | train subwords/s | generate subwords/s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| standard | 1,234,567 | 40 | 26.6 | 25.50 | 27.7 | 27.00 | 28.00 | 1,000 | 2,346 |",
        "| linear | 1,234,567 | 20 | – | 33.00 | – | 34.00 | 35.00 | 1,000 | 2,346 |",
        "| dpfp-512 | 1,234,567 | 40 | 26.2 | 25.50 | 27.1 | 26.25 | 27.25 | 1,000 | 2,346 |",
        "",
        "- BLEU: `tok:13a`",
        "- Compound-split BLEU: `tok:none`",
        "- Generated with: `--beam 4`",
    ]
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_a_summary_says_what_is_unfinished_missing_or_different(tmp_path: Path) -> None:
    cut = write_run(tmp_path / "cut", 50, finished=False, test=9)
    with (cut / "train.log").open("a") as log:
        log.write('2026-01-01 00:00:00 | INFO | train_inner | {"num_upd')
    result = cut / "generate-test.json"
    result.write_text(result.read_text().replace("tok:13a", "tok:zh"))
    damaged = write_run(tmp_path / "damaged", 20, test=9)
    (damaged / "generate-valid.json").write_text("{}")
    write_run(tmp_path / "unscored", 20, valid=9)
    (write_run(tmp_path / "early", 0) / "train.log").write_text("starting\n")
    result = summarize(tmp_path, "cut", "damaged", "unscored", "early", "never")
    assert result.returncode == 0 and "paper" not in result.stdout
    assert "| cut | 1,234,567 | 50 (unfinished) | – | 9.00 | 10.00 | 1,000 | 2,346 |" in result.stdout
    assert "| never | missing |" in result.stdout and "| early | missing |" in result.stdout
    assert "- BLEU (cut test): `tok:zh`\n- BLEU (damaged test, unscored valid): `tok:13a`" in result.stdout
    for message in (
        "cut/train.log is of an unfinished training: it ends at update 50, last validation at update 40",
        "cut/train.log has a damaged line",
        "damaged/generate-valid.json is no result of generate.sh",
        "unscored/generate-test.json is missing: unscored is trained, but was not scored on test",
        "early/train.log ends before the model was built",
        "never/train.log is missing",
    ):
        assert message in result.stderr


def test_a_training_that_went_on_is_one_training(tmp_path: Path) -> None:
    log = write_run(tmp_path / "a", 20, finished=False) / "train.log"
    later = write_run(tmp_path / "b", 40) / "train.log"
    log.write_text(log.read_text() + later.read_text())
    assert "| a | 1,234,567 | 40 | – | – | – | 1,000 | – |" in summarize(tmp_path, "a").stdout
    log.write_text(later.read_text() + log.read_text().split("done training")[0])
    assert "40 (unfinished)" in summarize(tmp_path, "a").stdout


@pytest.mark.parametrize("folder, message", [("nowhere", "no folder"), (".", "no folder with a training or a result")])
def test_nothing_to_summarize_is_an_error(folder: str, message: str, tmp_path: Path) -> None:
    result = summarize(tmp_path / folder)
    assert result.returncode == 1 and message in result.stderr and not result.stdout


# --- with fairseq


@pytest.fixture(scope="session")
def data(parallel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`parallel` as prepare.sh leaves it."""
    out = tmp_path_factory.mktemp("data") / "bin"
    result = run_script(PREPARE, out, parallel, env={"VOCABULARY": "360", "LC_ALL": "C"})
    assert result.returncode == 0, result.stderr
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_row_trains_the_model_that_it_names(
    name: str, data: Path, tmp_path: Path, programs: Programs, fairseq: Callable[[list[str]], None]
) -> None:
    _, (train,) = programs.run(ROWS[name], "train", data, tmp_path / "out", *TINY_TRAINING, *TINY_MODEL)
    (tmp_path / "out" / "checkpoint_last.pt").unlink()  # an empty one, of the program in fairseq's place
    fairseq(train)
    checkpoint = torch.load(tmp_path / "out" / "checkpoint_best.pt", weights_only=False)
    model = vars(checkpoint["cfg"]["model"])
    kind, _, size = name.partition("-")
    assert model["fast_weight_attention"] == ("none" if name == "standard" else "encoder,decoder,cross")
    if name != "standard":
        assert str(model["feature_map"]) == {"linear": "elu", "performer": "favor", "dpfp": "dpfp"}[kind]
    if kind == "performer":
        assert 2 * model["favor_features"] == int(size)
    if kind == "dpfp":
        assert 2 * 64 * model["dpfp_nu"] == int(size)
    assert model["share_all_embeddings"] and "best" in checkpoint["extra_state"]
    assert checkpoint["cfg"]["checkpoint"]["best_checkpoint_metric"] == "bleu"


@pytest.mark.slow
def test_a_row_runs_from_raw_text_to_bleu_and_goes_on_where_it_stopped(data: Path, tmp_path: Path) -> None:
    row, out = ROWS["linear"], tmp_path / "linear"
    tiny = [*TINY_TRAINING, *TINY_MODEL]
    result = run_script(row, "train", data, out, *tiny)
    assert result.returncode == 0 and "done training" in result.stdout, result.stdout
    result = run_script(row, "train", data, out, *tiny, "--max-update", "2", "--lr", "0.001", "--log-interval", "1")
    assert "Loaded checkpoint" in result.stdout and '"num_updates": "2"' in result.stdout, result.stdout

    result = run_script(row, "generate", data, out, "--cpu", "--max-len-b", "5", "--beam", "2")
    assert result.returncode == 0, result.stderr
    for subset, count in (("valid", 6), ("test", 4)):
        assert len(corpus.read_text(out / f"generate-{subset}.hyp")) == count
        values = json.loads((out / f"generate-{subset}.json").read_text())
        assert values["sentences"] == count and values["signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|")
        assert values["tokens_per_second"] > 0
    log = (out / "generate-test.log").read_text()
    assert {int(number) for number in re.findall(r"^H-(\d+)", log, re.MULTILINE)} == {0, 1, 2, 3}

    table = summarize(tmp_path)
    assert not table.stderr and "| linear | " in table.stdout and "| 25.5 |" in table.stdout


@pytest.mark.slow
def test_moses_tokens_and_bpe_go_from_raw_text_to_bleu(
    parallel: Path, tmp_path: Path, programs: Programs, fairseq: Callable[[list[str]], None]
) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    result = run_script(PREPARE, data, parallel, env={"VOCABULARY": "60", "SUBWORDS": "bpe"})
    assert result.returncode == 0, result.stderr
    _, (train,) = programs.run(ROWS["standard"], "train", data, out, *TINY_TRAINING, *TINY_MODEL)
    assert options(train)["--eval-bleu-detok"] == "moses" and options(train)["--eval-bleu-remove-bpe"] == ""
    assert json.loads(options(train)["--eval-bleu-detok-args"])["target_lang"] == "de"
    (out / "checkpoint_last.pt").unlink()
    fairseq(train)
    # A generation that repeats the references.
    target = {f"H-{n}\t0\t{line}\n" for n, line in enumerate(subwords_of(data, "test.de"))}
    result, _ = generate(programs, data, out, [*target, SUMMARY])
    assert result.returncode == 0, result.stderr
    raw = corpus.read_text(data / "raw" / "test.de")
    texts = corpus.read_text(out / "generate-test.hyp")
    assert [texts[0], texts[3]] == [raw[0], raw[3]]
    assert texts[2] == raw[2].replace("日本", "<unk> <unk>")  # it has no bytes to fall back on


def subwords_of(data: Path, name: str) -> list[str]:
    """The lines of a text of binarised data."""
    from fairseq.data import Dictionary, data_utils

    split, language = name.split(".")
    dictionary = Dictionary.load(str(data / f"dict.{language}.txt"))
    dataset = data_utils.load_indexed_dataset(str(data / f"{split}.en-de.{language}"), dictionary)
    return [dictionary.string(dataset[i]) for i in range(len(dataset))]


@pytest.mark.slow
def test_binarised_data_hold_each_line_and_nothing_unknown(data: Path, parallel: Path) -> None:
    model = subwords.SentencePieces((data / "subwords.model").read_bytes())
    for language in ("en", "de"):
        lines = subwords_of(data, f"test.{language}")
        assert [model.decode(line) for line in lines] == [
            corpus.clean(line) for line in corpus.read_text(parallel / f"test.{language}")
        ]
        assert "<unk>" not in " ".join(lines)
    assert (data / "dict.en.txt").read_bytes() == (data / "dict.de.txt").read_bytes()


@pytest.mark.slow
def test_the_comparison_runs_from_the_first_command_to_the_table(data: Path, tmp_path: Path) -> None:
    tiny = ["--", "--max-tokens", "256", *TINY_MODEL]
    env = {"UPDATES": "2", "SUBSETS": "test"}
    result = run_script(MULTI30K, data, tmp_path / "out", "dpfp", *tiny, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    table = summarize(tmp_path / "out").stdout
    assert "| dpfp | " in table and " | 2 | " in table and "tok:13a" in table and "paper" not in table
