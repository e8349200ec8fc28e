"""The commands of the page "Get started" give its numbers, and the notebook runs: what newcomers do works."""

import json
import re
from pathlib import Path
from typing import Any

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


NOTEBOOK = ROOT / "examples" / "first_model.ipynb"
SIZES = ("UPDATES, BATCH, LENGTH = 600, 16, 128", "WIDTH, LAYERS = 128, 2")


def test_the_notebooks_cells_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib").use("agg")
    monkeypatch.setattr("torch.set_num_threads", lambda threads: None)
    cells = [
        "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]
    for size, small in zip(SIZES, ("UPDATES, BATCH, LENGTH = 3, 2, 16", "WIDTH, LAYERS = 16, 1"), strict=True):
        assert size in cells[0]
        cells[0] = cells[0].replace(size, small)
    names: dict[str, Any] = {}
    for cell in cells:
        exec(cell.replace("most=20000", "most=100"), names)
    assert set(names["curves"]) == {"gated-delta", "softmax"} and len(names["curves"]["softmax"]) == 3
    lines = {line.get_label() for line in names["axes"].get_lines()}
    assert lines == set(names["curves"]) and len(names["scores"]) == 3
    assert names["written"].shape[1] == names["prompt"].shape[1] + 16
