"""Text that the scripts of examples/wikitext103, gpt2, xatl and smollm2 prepare for language models."""

import gzip
import json
import shutil
import subprocess
from argparse import Namespace
from pathlib import Path

import encode
import papers
import pytest
from common.sentencepieces import SentencePieces

from .conftest import DOCUMENTS, EXAMPLES, INTERRUPTION, Programs, Result, run_script

PREPARE = EXAMPLES / "wikitext103" / "prepare.sh"


@pytest.mark.slow
def test_words_get_the_numbers_of_a_dictionary_that_is_given(data: Path, tokens: Path, tmp_path: Path) -> None:
    out, given, other = tmp_path / "out", tmp_path / "given.txt", tmp_path / "other.txt"
    given.write_text("".join(reversed((data / "dict.txt").read_text().splitlines(keepends=True))))
    other.write_text("another 1\n")
    result = run_script(PREPARE, out, tokens, env={"SKIP_COUNTS": "1", "DICT": given})
    assert result.returncode == 0 and "unknown corpus in" in result.stdout, result.stderr
    made, wanted = ([line.split(" ")[0] for line in path.open()] for path in (out / "dict.txt", given))
    assert made == wanted and (out / "preprocess.log").read_text().count(" 0.0% replaced (by <unk>)") == 3
    for dictionary, status, told in ((given, 0, "is finished"), (other, 1, "are not those of DICT")):
        again = run_script(PREPARE, out, "FOLDER", env={"DICT": dictionary})
        assert again.returncode == status and told in again.stdout + again.stderr


@pytest.mark.slow
def test_words_are_cut_into_subwords_and_scores_are_per_word(tokens: Path, tmp_path: Path) -> None:
    result = run_script(PREPARE, out := tmp_path / "out", tokens, env={"SKIP_COUNTS": "1", "SUBWORDS": "340"})
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


def test_what_looks_finished_is_and_other_text_is_refused(tmp_path: Path) -> None:
    """With three files of known counts, 7, 3 and 3 tokens with line ends, plain or gzipped."""
    (small := tmp_path / "small").mkdir()
    # Words of bytes above 127 only, and white space above 127: both count as they do for fairseq in any locale.
    (small / "wiki.train.tokens").write_text(" \n – 日本\u3000b \n\u00a0c \n", encoding="utf-8")
    (small / "wiki.valid.tokens.gz").write_bytes(gzip.compress(b" a b \n"))
    (small / "wiki.test.tokens").write_text(" a b \n")
    body = f'mkdir -p "$dest" && seq 5 > "$dest/dict.txt"\n{INTERRUPTION}'
    programs = Programs(tmp_path / "programs", {"fairseq-preprocess": body})

    def prepare(**env: object) -> Result:
        return programs.run(PREPARE, f"{tmp_path}/out/", small, env={"SKIP_COUNTS": "1", **env})[0]

    assert prepare(INTERRUPT="KILL").returncode != 0 and not (tmp_path / "out").exists()
    assert "7 3 3 tokens" in prepare().stdout and (tmp_path / "out" / "dict.txt").exists()
    shutil.rmtree(tmp_path / "out")
    for content, message in (
        (b" a b \n", "have 7 3 3 tokens with line ends, which is neither WikiText-103"),
        (b"", "wiki.test.tokens is empty"),
        (b"\x1f\x8b\xff\n", "wiki.test.tokens, line 1: not UTF-8, byte 2 of the line is 0x8b"),
    ):
        (small / "wiki.test.tokens").write_bytes(content)
        result = prepare(SKIP_COUNTS="0")
        assert result.returncode == 1 and message in result.stderr and not list(tmp_path.glob("out*"))


@pytest.mark.slow
def test_documents_are_cut_into_the_models_subwords(gpt2: Path, gpt2_data: Path) -> None:
    from fairseq.data import Dictionary, data_utils

    from fairseq_fastweights.data.byte_level_bpe import ByteLevelBPE

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


def test_documents_are_counted_read_once_and_refused_if_they_are_damaged(tmp_path: Path, monkeypatch, capfd) -> None:
    """With a tokenizer that needs no model: a subword for each character."""
    for name in encode.TOKENIZER:
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(encode, "load_tokenizer", lambda source: lambda text: " ".join(map(str, map(ord, text))))
    (tmp_path / "train.jsonl").write_text('{"text": "abc"}\n' * 9)
    (tmp_path / "valid.txt").write_text("de\n")

    def main(most: str = "9") -> int:
        return encode.main([*[str(tmp_path)] * 3, "--train-tokens", most])

    # Each has 3 subwords and an end: two have 8, three 12.
    for most, number in (("9", 3), ("8", 2)):
        assert main(most) == 0 and (tmp_path / "train.bpe").read_text() == "97 98 99\n" * number
    assert f"{tmp_path / 'valid.bpe'} is there\n" in capfd.readouterr().out
    (tmp_path / "valid.txt").write_text("f\n")
    assert main() == 0 and (tmp_path / "valid.bpe").read_text() == "102\n"
    for path in tmp_path.glob("train.*"):
        path.unlink()
    damaged = "is damaged, or not what its name says"
    for name, content, message in (
        ("train.jsonl", b'{"text": "a"}\n{"texts": "b"}\n', "train.jsonl: line 2 is no JSON object with a text in it"),
        ("train.txt", b"a\n\xff\n", "train.txt, line 2: not UTF-8, byte 1 of the line is 0xff"),
        ("train.txt", b" \n<|endoftext|>\n", "there is no text"),
        ("train.txt.gz", gzip.compress(b"a\n" * 99, mtime=0)[:-9], damaged),
        ("train.txt.zst", b"no such thing", damaged if shutil.which("zstd") else "no program zstd"),
    ):
        (tmp_path / name).write_bytes(content)
        assert main() == 1 and message in capfd.readouterr().err and not list(tmp_path.glob("train.bpe"))
        (tmp_path / name).unlink()


@pytest.mark.slow
def test_smollm2_is_converted_its_text_cut_and_last_words_are_asked_for(smollm2: Path, smollm2_data: Path) -> None:
    """The split of each size: all lines, two lines of 53 words, and one."""
    counts = {split: 54 * lines for split, lines in (("train", 4), ("valid", 2), ("test", 1))}
    found = json.loads((smollm2_data / "words.json").read_text())
    assert {split: count["words"] for split, count in found.items()} == counts
    assert (smollm2_data / "dict.txt").read_text() == (smollm2 / "dict.txt").read_text()
    asked = [json.loads(line) for line in (smollm2.with_name("tasks") / "last_words.jsonl").open()]
    assert asked == [{"text": f"{'the cat ' * 24}sat on the mat"}] * 4
