"""examples/wmt14/generate.sh and score.py: translations in their order, signed BLEU, and results that are kept."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.examples.conftest import options
from tests.examples.wmt14.conftest import SUMMARY, Programs, contents, corpus, generate, score

pytestmark = pytest.mark.slow


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
    ("change", "message"),
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


@pytest.mark.parametrize(
    ("line", "parts"),
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
