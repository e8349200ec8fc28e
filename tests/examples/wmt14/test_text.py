"""examples/wmt14/corpus.py: what becomes of a line, and the text that prepare.sh refuses."""

from __future__ import annotations

import gzip
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.examples.wmt14.conftest import Programs, corpus


@pytest.mark.parametrize(
    ("raw", "line"),
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
    ("harm", "message"),
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
