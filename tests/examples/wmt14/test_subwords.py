"""examples/wmt14/subwords.py: what was cut is put together again, and the sizes that a vocabulary can have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.examples.wmt14.conftest import Programs, corpus, subwords

pytestmark = pytest.mark.slow


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
    ("env", "message"),
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
