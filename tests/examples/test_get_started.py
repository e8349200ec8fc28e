"""The numbers that the page "Get started" tells its readers to expect come out of the commands above them."""

import re
from pathlib import Path

import pytest

from tests.conftest import command
from tests.test_documentation import commands

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "get-started.md"
MORE_OR_LESS = 0.2
"""Python's help pages are the text, and differ between its versions."""


def expected(pattern: str) -> float:
    """A number on the page, whose lines may break anywhere."""
    [number] = re.findall(pattern, " ".join(PAGE.read_text(encoding="utf-8").split()))
    return float(number.replace(",", ""))


@pytest.mark.slow
def test_the_first_epoch_of_the_tutorial_gives_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    exec(re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)[0], {})
    shown = dict(reversed(list(commands(PAGE))))  # the first of each
    log = command("preprocess", *shown["preprocess"])
    [(types, tokens)] = re.findall(r"Dictionary: (\d+) types\n.*train.txt: \d+ sents, (\d+) tokens", log)
    assert int(types) == pytest.approx(expected(r"dictionary of about ([\d,]+) types"), rel=MORE_OR_LESS)
    assert int(tokens) == pytest.approx(expected(r"text of about ([\d,]+) tokens"), rel=MORE_OR_LESS)
    words = [str(ROOT / word) if word == "fairseq_fastweights" else word for word in shown["train"]]
    log = command("train", *words, "--cpu", "--max-update", "100", "--num-workers", "0", "--log-format", "simple")
    [perplexity] = re.findall(r"valid on 'valid' subset .*\| ppl ([\d.]+)", log)
    wanted = expected(r"validation perplexity of about (\d+) after the first epoch")
    assert float(perplexity) == pytest.approx(wanted, rel=MORE_OR_LESS)
