"""Data of fairseq-preprocess are whole and can be read again; text that is none is named in one line."""

import fcntl
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fairseq import utils
from fairseq.data import Dictionary, data_utils

from fairseq_fastweights import command_line
from tests.conftest import command

pytest.importorskip("fairseq.whole_folders", reason="needs the fairseq of tools/build_fairseq.py --force")
pytestmark = pytest.mark.usefixtures("our_fairseq")

BAD = b"a b\n" * 9 + b"\xc3\xb6 \xff\n" + b"b c\n" * 9
SAYS = "line 10: not UTF-8, byte 4 of the line is 0xff (byte 40 of the file)"


def preprocess(folder: Path, *flags: str, text: str = "text") -> str:
    return command("preprocess", "--only-source", "--trainpref", str(folder / text), "--destdir", *flags)


@pytest.mark.parametrize(
    "words",
    [
        ["b c", " ", "", " d ", "\t", "e\u2028f", "g\x85h", "i\rj", "k\x0bl", "\u3000"],
        ["\ufeffm", "n", "\ufeff"],
        ["#fairseq:overwrite", "o 5", "p 7 #fairseq:overwrite"],
        ["madeupword0000", "q" * 10_000, "日本", "\N{GRINNING FACE}"],
    ],
)
def test_dictionaries_are_loaded_as_they_were_saved(tmp_path, words):
    dictionary = Dictionary()
    for count, word in zip((-7, 0, 10**30, *range(9)), words, strict=False):
        dictionary.add_symbol(word, count)
    dictionary.pad_to_multiple_(8)
    for _ in range(2):
        dictionary.save(path := str(tmp_path / "dict.txt"))
        loaded = Dictionary.load(path)
        assert loaded.symbols == dictionary.symbols and loaded.count[4:] == dictionary.count[4:]
        assert loaded.indices == dictionary.indices
    dictionary.add_symbol("two\nlines")
    with pytest.raises(ValueError, match=r"the symbol 'two\\nlines', which cannot be saved: it ends a line"):
        dictionary.save(path)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (b"a 3\n\nb 3\n", "line 2: Incorrect dictionary format, expected '<token> <cnt> [flags]': '\\n'"),
        (b"a 3\nb x\n", "line 2: Incorrect dictionary format, expected '<token> <cnt> [flags]': 'b'"),
        (b"a 3\nb 2\na 1\n", "line 3: Duplicate word found when loading Dictionary: 'a'. "),
        (b"a 3\n\xff 1\n", "line 2: not UTF-8, byte 1 of the line is 0xff (byte 5 of the file)"),
    ],
)
def test_rows_that_cannot_be_read_are_named(tmp_path, rows, says):
    (tmp_path / "dict.txt").write_bytes(rows)
    with pytest.raises(ValueError) as error:
        Dictionary.load(str(tmp_path / "dict.txt"))
    assert str(error.value).startswith(f"{tmp_path / 'dict.txt'}, {says}")


def test_a_mark_and_other_ends_of_lines_are_no_part_of_the_words(tmp_path):
    (tmp_path / "dict.txt").write_bytes(b"\xef\xbb\xbfa 3\r\nb 2\r\n")
    assert Dictionary.load(str(tmp_path / "dict.txt")).symbols[4:] == ["a", "b"]
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbfa b\r\nc\rd\n")
    for workers in ("1", "2"):
        out = tmp_path / workers
        preprocess(tmp_path, str(out), "--workers", workers)
        words = Dictionary.load(str(out / "dict.txt"))
        assert sorted(words.symbols[4:8]) == ["a", "b", "c", "d"]
        lines = data_utils.load_indexed_dataset(str(out / "train"), words)
        assert [words.string(line) for line in lines] == ["a b", "c", "d"]


@pytest.mark.parametrize("workers", ["1", "3"])
def test_a_preprocessing_that_fails_leaves_what_was_there(tmp_path, workers):
    (tmp_path / "text").write_text("a b\n" * 9)
    out = tmp_path / "out"
    preprocess(tmp_path, str(out))
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.suffix != ".log"}
    (tmp_path / "bad").write_bytes(BAD)
    (tmp_path / "dict.txt").write_text("b 1\n")
    flags = ["--workers", workers, "--srcdict", str(tmp_path / "dict.txt")]
    with pytest.raises(ValueError) as error:
        preprocess(tmp_path, str(out), *flags, text="bad")
    assert str(error.value) == f"{tmp_path / 'bad'}, {SAYS}"
    assert before == {path.name: path.read_bytes() for path in out.iterdir() if path.suffix != ".log"}


NO_TEXT = "argument --trainpref: it is missing; dictionaries are made from its text, unless --srcdict names one"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--trainpref no/such", "argument --trainpref: there is no file no/such"),
        ("--trainpref .", "argument --trainpref: there is no file ."),
        ("--trainpref text --validpref text,no/such", "argument --validpref: there is no file no/such"),
        ("--trainpref text --testpref empty", "argument --testpref: empty is empty"),
        ("--trainpref empty --dict-only", "argument --trainpref: empty is empty"),
        ("--testpref text --srcdict no/such", "argument --srcdict: there is no file no/such"),
        ("--testpref text", NO_TEXT),
        (
            "--trainpref text --destdir .",
            "argument --destdir: ./dict.txt exists; it must be another folder, or --srcdict ./dict.txt keeps it",
        ),
        ("--testpref parallel --source-lang a --target-lang b --srcdict words", NO_TEXT),
        ("--testpref text --srcdict words", None),
        ("--trainpref parallel --source-lang a --target-lang b", "argument --trainpref: there is no file parallel.b"),
        ("--trainpref text --validpref no/such --dict-only", None),  # which is not read then
        ("--trainpref parallel --source-lang a", None),
    ],
)
def test_texts_and_dictionaries_that_are_missing_or_empty_are_named_first(tmp_path, monkeypatch, flags, says):
    monkeypatch.chdir(tmp_path)
    for name in ("text", "parallel.a"):
        Path(name).write_text("a b\n" * 9)
    Path("empty").touch()
    for name in ("words", "dict.txt"):
        Path(name).write_text("a 9\nb 9\n")
    words = ["--destdir", "out", *flags.split(), *([] if "--target-lang" in flags else ["--only-source"])]
    if says is None:
        command("preprocess", *words)
    else:
        with pytest.raises(ValueError) as error:
            command("preprocess", *words)
        assert str(error.value) == command_line.told(error.value) == says
    assert Path("out").exists() == (says is None)


def test_data_that_is_preprocessed_again_is_read_on_as_it_was(tmp_path):
    (tmp_path / "text").write_text("a b c\n" * 9)
    out = tmp_path / "out"
    preprocess(tmp_path, str(out))
    data = data_utils.load_indexed_dataset(str(out / "train"), Dictionary.load(str(out / "dict.txt")))
    left, used = out / ".unfinished-left", out / ".unfinished-used"
    for folder in (left, used):
        folder.mkdir()
        (folder / "train.bin").touch()
    descriptor = os.open(used, os.O_RDONLY)  # by another process, which lives
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    (tmp_path / "text").write_text("c\n")
    preprocess(tmp_path, str(out), "--srcdict", str(out / "dict.txt"))
    type(data).__getitem__.cache_clear()
    assert [len(data[number]) for number in range(9)] == [4] * 9
    assert len(data_utils.load_indexed_dataset(str(out / "train"))) == 1
    assert used.exists() and not left.exists()
    os.close(descriptor)


def align(bad: Path) -> str:
    for language in ("en", "de"):
        bad.with_suffix(f".{language}").write_text("a b\n" * 19)
    flags = ["--trainpref", str(bad.with_suffix("")), "--destdir", str(bad.with_name("out"))]
    return command("preprocess", *f"-s en -t de --align-suffix {bad.suffix[1:]}".split(), *flags)


def subwords(bad: Path) -> object:
    from fairseq.data.encoders.subword_nmt_bpe import SubwordNMTBPE, SubwordNMTBPEConfig

    return SubwordNMTBPE(SubwordNMTBPEConfig(bpe_codes=str(bad)))


def score(*flags: str, given: bytes = b"") -> str:
    stdin, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(given))
    try:
        return command("score", *flags)
    finally:
        sys.stdin = stdin


READERS = {
    "alignments": align,
    "scored": lambda bad: score("--sys", str(bad), "--ref", __file__),
    "reference": lambda bad: score("--sys", str(bad), "--ref", str(bad)),
    "standard input": lambda bad: score("--ref", __file__, given=bad.read_bytes()),
    "raw": lambda bad: data_utils.load_indexed_dataset(str(bad), Dictionary(), "raw"),
    "words to put in": lambda bad: utils.load_align_dict(str(bad)),
    "embeddings": lambda bad: utils.parse_embedding(str(bad)),
    "subwords": subwords,
}


@pytest.mark.parametrize("reader", READERS)
def test_text_that_is_no_utf8_is_named_by_all_that_read_it(tmp_path, reader):
    bad = tmp_path / "text.align"
    bad.write_bytes(BAD.replace(b"a b", b"0-0") if "align" in reader else BAD)
    with pytest.raises(ValueError) as error:
        READERS[reader](bad)
    assert str(error.value) == f"{'standard input' if reader == 'standard input' else bad}, {SAYS}"
    assert command_line.told(error.value) == str(error.value)


def test_a_command_without_a_plugin_ends_in_one_line(capsys, monkeypatch):
    import fairseq_cli
    from fairseq.invalid_input import InvalidInput
    from fairseq.text_files import FileError

    monkeypatch.setattr(sys, "argv", ["bin/fairseq-preprocess"])
    monkeypatch.setattr(fairseq_cli.threading, "active_count", lambda: 1)
    # Commands set their log up before they import fairseq, which would do it otherwise.
    code = "import sys, fairseq_cli; sys.exit('fairseq' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    for error in (FileError("text, line 1: not UTF-8"), InvalidInput("--lr is ''")):
        with pytest.raises(SystemExit, match="2"):
            fairseq_cli._end(print, type(error), error, None)
        assert capsys.readouterr().err == f"fairseq-preprocess: error: {error}\n"
    fairseq_cli._end(lambda *error: print(error[1]), ValueError, "x", None)
    assert capsys.readouterr().out == "x\n"
