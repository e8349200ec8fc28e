"""Text becomes the numbers that the real tokenizers give, and comes back whole, whatever it holds."""

import json
import random
import sys
import unicodedata
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from fairseq.data import encoders

from fairseq_fastweights.conversion.tokenizers.tokenizer_json import read_whole_tokenizer
from tests.conftest import import_plugin
from tests.conversion import llamas, sources

TEXTS = [
    "",
    " ",
    "the cat sat on the mat",
    "  two spaces,   three,    four,     five\tand a tab",
    "lines\nand\r\nmore\n\n\nlines \n ",
    "it's we're I'LL 12345 x1y2 a_b -- ...!?",
    "Grüße, naïve façade; Ελληνικά, русский, עברית, العربية, हिन्दी, ไทย, 日本語, 한국어",
    "e\u0301 A\u030a \u1100\u1161 \ufb01 \u00bd",  # not in normal form C, or not in K
    "👩‍👩‍👧‍👦 🇩🇪 \U0001f3f4\U000e0067\U000e0062 \u200d\ufeff\u2028\u2029\u0085\u00a0\u3000x",
    "\x00\x01\x1c\x1f\x7f\ud7ff\ue000\uffff\U0010ffff",
]


def random_texts() -> list[str]:
    """All characters that Python 3.10 knows; tables of Unicode differ in newer ones."""
    draw = random.Random(0)
    known = [chr(c) for c in range(sys.maxunicode + 1) if unicodedata.category(chr(c)) not in ("Cn", "Cs")]
    known = [c for c in known if unicodedata.ucd_3_2_0.category(c) != "Cn"] + list("  \n'stth")
    return ["".join(draw.choices([draw.choice(known) for _ in range(9)] + list(" the"), k=30)) for _ in range(200)]


ALL = [*TEXTS, *random_texts()]


@pytest.fixture(scope="module", params=["gpt2", "gpt2 in two files", "neox"])
def both(request, tmp_path_factory) -> tuple[Any, Path, bool]:
    """The real tokenizer, the folder that was written, and whether it is one such as Pythia's."""
    neox, folder = request.param == "neox", tmp_path_factory.mktemp("tokenizer")
    real = sources.save_tokenizer(folder, neox, two_files="two" in request.param)
    read = read_whole_tokenizer(folder, byte_level=True)
    end = 0 if neox else sources.TYPES - 1
    assert read.end_of_text == end and read.size == sources.TYPES
    read.check(288, end)
    (folder / "made").mkdir()
    read.write(folder / "made", 288, end)
    return real, folder, neox


def whole(folder: Path | str) -> Any:
    import_plugin()
    return encoders.build_bpe(Namespace(bpe="tokenizer_json", tokenizer_json_folder=str(folder)))


def fairseqs(folder: Path) -> Any:
    files = {"gpt2_encoder_json": str(folder / "encoder.json"), "gpt2_vocab_bpe": str(folder / "vocab.bpe")}
    return encoders.build_bpe(Namespace(bpe="gpt2", **files))


def test_texts_get_the_real_numbers_and_come_back(both):
    real, folder, neox = both
    bpe = whole(folder / "made")
    for text in ALL:
        numbers = bpe.encode(text)
        assert [int(n) for n in numbers.split()] == real.encode(text).ids, repr(text)
        assert bpe.decode(numbers) == (unicodedata.normalize("NFC", text) if neox else text), repr(text)
        assert bpe.decode(numbers) == real.decode([int(n) for n in numbers.split()]), repr(text)
    # The end of text is fairseq's.
    text, end = "the cat<|endoftext|> the mat", str(real.token_to_id("<|endoftext|>"))
    words = bpe.encode(text).split()
    assert words.count("</s>") == 1 and "<unk>" not in words
    assert [end if word == "</s>" else word for word in words] == [str(n) for n in real.encode(text).ids]
    assert bpe.decode(" ".join(words)) == text and bpe.decode("<unk>") == ""
    assert [bpe.is_beginning_of_word(bpe.encode(start).split()[0]) for start in (" the", "the")] == [True, False]
    # No number that a model can draw makes decoding fail; some are of no word.
    assert all(isinstance(bpe.decode(str(number)), str) for number in range(288))
    assert {bpe.decode(str(number)) for number in range(sources.TYPES, 288)} == {""}


@pytest.mark.parametrize("pieces", [False, True])
def test_texts_of_tokenizers_with_splits_of_their_own(tmp_path, pieces):
    real = llamas.tokenizer(pieces)
    real.save(str(tmp_path / "tokenizer.json"))
    read_whole_tokenizer(tmp_path).write(tmp_path, 400, 1)
    bpe = whole(tmp_path)
    for text in ("", "the cat  sat\n\t12345", "Grüße, 日本語 🎉 \u2028 it's", "x<|begin|>y"):
        assert [int(n) for n in bpe.encode(text).split()] == real.encode(text).ids
        if not (pieces and "<|" in text):  # after an added token its mark for a beginning is a space
            assert bpe.decode(bpe.encode(text)) == text
    assert bpe.encode("a<|end|>") == f"{bpe.encode('a')} </s>" and bpe.decode("</s> <unk>") == "<|end|>"
    starts = [bpe.is_beginning_of_word(str(number)) for number in real.encode("the mat").ids]
    assert starts[0] is pieces and (pieces or any(starts[1:])) and not bpe.is_beginning_of_word("</s>")


def test_fairseqs_gpt2_has_files_where_it_gives_the_same_numbers(both):
    real, folder, neox = both
    assert (folder / "made" / "encoder.json").exists() is (folder / "made" / "vocab.bpe").exists() is not neox
    if neox:  # Pythia's joins spaces, and has NFC
        return
    bpe = fairseqs(folder / "made")
    assert all(bpe.encode(text).split() == [str(n) for n in real.encode(text).ids] for text in ALL)
    assert all(bpe.decode(bpe.encode(text)) == text for text in ALL)
    assert all(isinstance(bpe.decode(str(number)), str) for number in range(288))


def test_fairseqs_gpt2_has_no_files_where_other_words_are_cut_out(tmp_path):
    real = sources.tokenizer(neox=False)
    real.add_tokens(["<|user|>"])
    real.save(str(tmp_path / "tokenizer.json"))
    read_whole_tokenizer(tmp_path).write(tmp_path, 288, sources.TYPES - 1)
    assert {file.name for file in tmp_path.iterdir()} == {"tokenizer.json", "tokenizer_words.json"}


def test_pieces_are_never_dropped_by_chance(tmp_path):
    content = json.loads(sources.tokenizer(False).to_str())
    content["model"]["dropout"] = 1.0  # in training each word is cut into bytes
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "made").mkdir()
    read_whole_tokenizer(tmp_path).write(tmp_path / "made", 288, 271)
    assert len(whole(tmp_path / "made").encode("the").split()) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        # As GPT-NeoX's does: without tokenizer.json no one knows when they are cut out of a text.
        ("vocab.json", {"   ": 300}, r"vocab.json: 1 pieces, '   ' for one, are not written in characters for byt"),
        ("tokenizer_config.json", {"add_bos_token": True}, "tokenizer_config.json: add_bos_token is set"),
        ("added_tokens.json", {"<pad>": "0"}, "added_tokens.json: the number of '<pad>' is 0; it must be a whole num"),
        ("merges.txt", b"\xff", "merges.txt, line 1: not UTF-8"),
        ("merges.txt", b"a b c", "merges.txt: it holds 'a b c'; each line must be two pieces"),
        ("merges.txt", b"x y", "vocab.json: it lacks the piece 'xy', a byte or one that merges.txt makes"),
        ("tokenizer.json", {"added_tokens": [5]}, "added_tokens holds 5; it must have a content and an id"),
        ("tokenizer.json", {"added_tokens": 7}, "added_tokens is 7; it must be a list"),
        ("tokenizer.json", {"model": 7}, "tokenizer.json: this is no tokenizer"),
        ("tokenizer.json", b"", "tokenizer.json: this is not JSON"),
        ("vocab.json", None, "there is no tokenizer; it must hold tokenizer.json, or vocab.json and merges.txt"),
    ],
)
def test_files_that_say_too_little_or_more_are_refused(tmp_path, name, content, message):
    sources.save_tokenizer(tmp_path, neox=False, two_files=True)
    if isinstance(content, dict):
        before = json.loads((tmp_path / name).read_text()) if (tmp_path / name).exists() else {}
        content = json.dumps(before | content).encode()
    if content is None:
        (tmp_path / name).unlink()
        with pytest.raises(ValueError, match=r"tokenizer.json: there is no such file"):
            read_whole_tokenizer(tmp_path)
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_whole_tokenizer(tmp_path, byte_level=True)


def test_the_library_is_named_where_it_is_missing(both, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"made/tokenizer.json: reading it needs .* tokenizers: pip install tokeniz"):
        whole(both[1] / "made")


@pytest.mark.parametrize("folder", ["", "nowhere"])
def test_a_folder_without_a_tokenizer_is_named(folder):
    with pytest.raises(ValueError, match=f"tokenizer_json_folder is '{folder}'; it must hold tokenizer.json and tok"):
        whole(folder)
