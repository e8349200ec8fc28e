"""The notebook trains, tests, draws and generates: its cells run as they stand, but for sizes."""

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "first_model.ipynb"
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
