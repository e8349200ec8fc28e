"""examples/gpt2 and examples/xatl: text is cut into a converted model's subwords."""

import gzip
import json
import shutil
import subprocess
from argparse import Namespace
from pathlib import Path

import encode
import pytest

from .conftest import DOCUMENTS, EXAMPLES, run_script


@pytest.mark.slow
def test_prepared_text_is_the_documents_in_the_models_subwords(gpt2: Path, gpt2_data: Path) -> None:
    from fairseq.data import Dictionary, data_utils

    from fairseq_fastweights.data.byte_level_bpe import ByteLevelBPE

    assert {path.name for path in gpt2_data.parent.iterdir()} == {"bin", "text"}
    assert (gpt2_data / "dict.txt").read_text() == (gpt2 / "dict.txt").read_text()
    dictionary = Dictionary.load(str(gpt2_data / "dict.txt"))
    decode = ByteLevelBPE(Namespace(byte_level_folder=str(gpt2))).decode
    for split, documents in DOCUMENTS.items():
        lines = data_utils.load_indexed_dataset(str(gpt2_data / split), dictionary)
        assert all(line[-1] == dictionary.eos() and dictionary.unk() not in line for line in lines)
        # In the midst of a text, <|endoftext|> is the same symbol as the one between texts.
        assert [decode(" ".join(dictionary[number] for number in line[:-1])) for line in lines] == documents
    again = run_script(EXAMPLES / "gpt2" / "prepare.sh", gpt2_data, gpt2, "FOLDER")
    assert again.returncode == 0 and "is finished" in again.stdout


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tokenizer that needs no model: a subword for each character."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name in encode.TOKENIZER:
        (folder / name).write_text(name)
    monkeypatch.setattr(encode, "load_tokenizer", lambda source: lambda text: " ".join(map(str, map(ord, text))))
    return folder


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_documents_are_what_stands_between_separators_or_on_lines_of_json(packed: str, tmp_path: Path) -> None:
    if packed == ".zst" and shutil.which("zstd") is None:
        pytest.skip("needs zstd")
    texts = ["a\u2028b\r\nc\n\nd", "  e ", "f<|endoftext|>\ng"]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in [*texts[:2], " \n", texts[2]])
    for kind, content in ((".txt", "\n<|endoftext|>\n".join([*texts[:2], "", texts[2]]) + "\n"), (".jsonl", lines)):
        path = tmp_path / f"text{kind}{packed}"
        path.write_bytes(gzip.compress(content.encode()) if packed == ".gz" else content.encode())
        if packed == ".zst":
            path.write_bytes(subprocess.run(["zstd", "-qc", path], capture_output=True, check=True).stdout)
        assert list(encode.documents(path)) == texts


def test_as_many_documents_are_taken_as_asked_for_and_none_twice(source: Path, tmp_path: Path):
    (tmp_path / "train.jsonl").write_text('{"text": "abc"}\n' * 9)
    (tmp_path / "valid.jsonl").write_text('{"text": "de"}\n')
    # Each has 3 subwords and an end: two have 8, three 12.
    for most, wanted in (("9", "97 98 99\n" * 3), ("8", "97 98 99\n" * 2)):
        assert encode.main([str(source), str(tmp_path), str(tmp_path), "--train-tokens", most]) == 0
        assert (tmp_path / "train.bpe").read_text() == wanted
        (tmp_path / "valid.jsonl").write_text('{"text": "f"}\n')
    assert (tmp_path / "valid.bpe").read_text() == "102\n"


@pytest.mark.slow
def test_smollm2_is_converted_its_text_cut_and_last_words_are_asked_for(smollm2: Path, smollm2_data: Path) -> None:
    """The split of each size: all lines, two lines of 53 words, and one."""
    counts = {split: 54 * lines for split, lines in (("train", 4), ("valid", 2), ("test", 1))}
    found = json.loads((smollm2_data / "words.json").read_text())
    assert {split: count["words"] for split, count in found.items()} == counts
    assert (smollm2_data / "dict.txt").read_text() == (smollm2 / "dict.txt").read_text()
    asked = [json.loads(line) for line in (smollm2.with_name("tasks") / "last_words.jsonl").open()]
    assert asked == [{"text": f"{'the cat ' * 24}sat on the mat"}] * 4
    assert not smollm2.with_name("text").exists()


def test_text_that_is_not_right_is_refused_and_nothing_looks_finished(source: Path, tmp_path: Path, capfd) -> None:
    (tmp_path / "valid.txt").write_text("a\n")
    damaged = "is damaged, or not what its name says"
    for name, content, message in (
        ("train.jsonl", b'{"text": "a"}\n{"texts": "b"}\n', "train.jsonl: line 2 is no JSON object with a text in it"),
        *(("train.jsonl", line, "line 1 is no JSON object") for line in (b'{"text": "b"\n', b'{"text": 1}\n')),
        ("train.txt", b"a\n\xff\n", "train.txt, line 2: not UTF-8, byte 1 of the line is 0xff"),
        ("train.txt", b" \n<|endoftext|>\n", "there is no text"),
        ("train.txt.gz", b"no such thing", damaged),
        ("train.txt.gz", gzip.compress(b"a\n" * 99, mtime=0)[:-9], damaged),
        ("train.txt.zst", b"no such thing", damaged if shutil.which("zstd") else "no program zstd"),
    ):
        (tmp_path / name).write_bytes(content)
        assert encode.main([str(source), str(tmp_path), str(tmp_path)]) == 1
        assert message in capfd.readouterr().err and not [*tmp_path.glob("*.bpe"), *tmp_path.glob("*.json")]
        (tmp_path / name).unlink()
