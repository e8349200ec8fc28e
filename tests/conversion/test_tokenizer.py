"""Text becomes the numbers that the real tokenizers give, and comes back whole, whatever it holds."""

import json
import random
import shutil
import sys
import unicodedata
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fairseq.data import encoders

import fairseq_fastweights.data.byte_level_bpe  # noqa: F401
from fairseq_fastweights.conversion.tokenizers.byte_level import read_tokenizer
from tests.conversion import sources

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
    read = read_tokenizer(folder)
    end = 0 if neox else sources.TYPES - 1
    assert read.end_of_text == end and read.size == sources.TYPES and read.is_plain(end) is not neox
    assert not replace(read, normalizer="NFC", added={}).is_plain(end)
    read.check(288, end)
    read.write(folder, 288, end)
    return real, folder, neox


def byte_level(folder: Path | str) -> Any:
    return encoders.build_bpe(Namespace(bpe="byte_level", byte_level_folder=str(folder)))


def fairseqs(folder: Path) -> Any:
    files = {"gpt2_encoder_json": str(folder / "encoder.json"), "gpt2_vocab_bpe": str(folder / "vocab.bpe")}
    return encoders.build_bpe(Namespace(bpe="gpt2", **files))


def test_byte_level_gives_the_real_numbers_and_the_text_back(both):
    real, folder, neox = both
    bpe = byte_level(folder)
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
    assert bpe.decode(" ".join(words)) == text and bpe.decode("<unk>") == "<unk>"
    assert [bpe.is_beginning_of_word(bpe.encode(start).split()[0]) for start in (" the", "the")] == [True, False]


def test_fairseqs_gpt2_does_where_the_tokenizer_is_plain(both):
    real, folder, neox = both
    bpe = fairseqs(folder)
    same = [bpe.encode(text).split() == [str(n) for n in real.encode(text).ids] for text in ALL]
    assert all(same) is not neox  # Pythia's joins spaces, and has NFC
    assert all(bpe.decode(bpe.encode(text)) == text for text in ALL)
    # No number that a model can draw makes decoding fail.
    for bpe in (fairseqs(folder), byte_level(folder)):
        assert all(isinstance(bpe.decode(str(number)), str) for number in range(288))
    assert {byte_level(folder).decode(str(number)) for number in range(sources.TYPES, 288)} == {""}  # of no word


UNSET = {"dropout": 0.1, "byte_fallback": True, "ignore_merges": True, "end_of_word_suffix": "</w>"}
UNSET |= {"continuing_subword_prefix": "##"}
STRIPS = ("lstrip", "rstrip", "single_word")
SPLIT = {"type": "Sequence", "pretokenizers": [{"type": "Split"}, {"type": "ByteLevel"}]}
LOWER = {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}
TEMPLATE = {"type": "TemplateProcessing", "special_tokens": {"<s>": {}}}


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("normalizer", {"type": "NFKC"}, "normalizer is NFKC; only NFC, or none"),
        ("normalizer", LOWER, r"normalizer is Sequence \(NFC, Lowercase\)"),
        ("pre_tokenizer", SPLIT, r"pre_tokenizer is Sequence \(Split, ByteLevel\)"),
        ("pre_tokenizer", "none", "pre_tokenizer is 'none'"),
        ("pre_tokenizer", None, "pre_tokenizer is missing"),
        ("pre_tokenizer/add_prefix_space", True, "ByteLevel add_prefix_space true"),
        ("pre_tokenizer/use_regex", False, "use_regex false"),
        ("post_processor", TEMPLATE, "post_processor is TemplateProcessing"),
        ("model/type", "Unigram", "model is 'Unigram'; only 'BPE'"),
        ("model", None, "model is missing"),
        *((f"model/{name}", value, f"{name} of the model is {value!r}") for name, value in UNSET.items()),
        ("model/merges", None, "merges of the model are missing"),
        ("model/merges", ["a b c"], "merges hold .*'c'.*; each must be two pieces"),
        ("model/merges", [["x", "y"]], "merges join 'x' and 'y', which the vocabulary lacks"),
        ("model/vocab", [], "the vocabulary must give each piece its number"),
        ("model/vocab/!", "1", "the vocabulary must give each piece its number"),
        ("model/vocab/!", 2, "several pieces with the same number"),
        ("model/vocab/!", ..., "1 of the 256 bytes have no piece, '!'"),
        *((f"added_tokens/0/{name}", True, rf"{name} of the added token '<\|endoftext\|>' is set") for name in STRIPS),
        ("added_tokens/0/id", 3, r"3 is .* in the vocabulary and '<\|endoftext\|>' in added_tokens"),
        ("added_tokens/0/id", None, "added_tokens holds .*; it must have a content and an id"),
        ("added_tokens/0/id", 10**12, "added_tokens holds .*; it must have a content and an id"),
        ("added_tokens", [5], "added_tokens holds 5; it must have a content and an id"),
        ("added_tokens", 7, "added_tokens is 7; it must be a list"),
    ],
)
def test_what_cannot_be_reproduced_is_refused_by_name(tmp_path, place, value, message):
    """With `value` in that place of tokenizer.json, or without what is there."""
    part = content = json.loads(sources.tokenizer(False).to_str())
    *path, last = place.split("/")
    for name in path:
        part = part[int(name) if name.isdigit() else name]
    part[last] = value
    if value is ...:
        del part[last]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as error:
        read_tokenizer(tmp_path)
    assert "tokenizer.json" in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        # As GPT-NeoX's does: without tokenizer.json no one knows when they are cut out of a text.
        ("vocab.json", {"   ": 300}, r"vocab.json: 1 pieces, '   ' for one, are not written in characters for byt"),
        ("tokenizer_config.json", {"add_bos_token": True}, "tokenizer_config.json: add_bos_token is set"),
        ("added_tokens.json", {"<pad>": "0"}, "added_tokens.json: the vocabulary must give each piece its number"),
        ("merges.txt", b"\xff", "merges.txt, line 1: not UTF-8"),
    ],
)
def test_two_files_that_say_too_little_or_more_are_refused(tmp_path, name, content, message):
    sources.save_tokenizer(tmp_path, neox=False, two_files=True)
    if isinstance(content, dict):
        before = json.loads((tmp_path / name).read_text()) if (tmp_path / name).exists() else {}
        content = json.dumps(before | content).encode()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        *(
            ("byte_level.json", place, value)
            for place in ("normalizer", "end_of_text", "vocabulary", "added")
            for value in (7.5, "x", [[]], {"a": 1})
        ),
        ("byte_level.json", "added", [{"word": "x", "number": "1", "normalized": True}]),
        ("encoder.json", "!", "1"),
        ("encoder.json", "!", ...),
        ("vocab.bpe", None, "#version: 0.2\na b c\n"),
    ],
)
def test_files_of_a_run_that_hold_something_else_are_named(both, tmp_path, name, place, value):
    folder = shutil.copytree(both[1], tmp_path / "x")
    if place is None:
        (folder / name).write_text(value)
    else:
        content = json.loads((folder / name).read_text())
        content[place] = value
        if value is ...:
            del content[place]
        (folder / name).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"x/{name}: ") as error:
        byte_level(folder)
    assert "\n" not in str(error.value)


def test_added_words_may_be_in_the_vocabulary_as_they_are(tmp_path):
    content = json.loads(sources.tokenizer(True).to_str())
    content["model"]["vocab"] |= {word["content"]: word["id"] for word in content["added_tokens"]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    for folder in ("", str(tmp_path)):  # before the files are there
        with pytest.raises(ValueError, match=f"byte_level_folder is '{folder}'; it must be a folder with encoder.json"):
            byte_level(folder)
    read_tokenizer(tmp_path).write(tmp_path, 288, 0)
    for bpe in (fairseqs(tmp_path), byte_level(tmp_path)):
        assert all(bpe.decode(str(word["id"])) == word["content"] for word in content["added_tokens"])
