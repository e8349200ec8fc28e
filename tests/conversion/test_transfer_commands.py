"""fairseq-train with a transfer: one command, and a report before it trains."""

from __future__ import annotations

import re
import shutil

import pytest

from tests.conftest import evaluate, train

DELTA = "--decoder-normalize-before --update-rule delta --lr 0.003".split()


@pytest.mark.slow
def test_one_command_swaps_and_trains_and_what_it_leaves_needs_no_source(corpus, trained, tmp_path):
    flags = ["--tokens-per-sample", "16", "--gen-subset", "train"]
    expected = evaluate(corpus, trained / "model.pt", *flags)
    source = ["--transfer-from", str(shutil.copytree(trained, tmp_path / "source"))]
    softmax = ["--decoder-normalize-before", "--softmax-attention-layers", "all", "--lr", "1e-30", "--max-update", "1"]
    train(corpus, tmp_path / "same", *softmax, *source)
    log = train(corpus, tmp_path / "swapped", *DELTA, *source)
    # The report stands before what fairseq says first of the model.
    assert 0 < log.index("transfer from") < log.index("num. shared model params")
    logs = [log, train(corpus, tmp_path / "fresh", *DELTA)]
    first = [float(re.findall(r'"loss": "([^"]+)"', log)[0]) for log in logs]
    shutil.rmtree(tmp_path / "source")
    names = ("same", "swapped", "fresh")
    same, *others = (evaluate(corpus, tmp_path / name / "checkpoint_last.pt", *flags) for name in names)
    assert same == pytest.approx(expected, abs=1e-5)
    assert first[0] < first[1] and others[0][0] < others[1][0]


def test_a_dry_run_reports_and_leaves_data_and_checkpoints_alone(trained, tmp_path, caplog):
    # There is nothing but a dictionary, so that data would be missed.
    (tmp_path / "data").mkdir()
    shutil.copy(trained / "dict.txt", tmp_path / "data")
    (tmp_path / "checkpoint_last.pt").write_bytes(b"of another run")
    with pytest.raises(SystemExit) as stopped:
        train(tmp_path / "data", tmp_path, *DELTA, "--transfer-from", str(trained), "--freeze", "output", "--dry-run")
    assert stopped.value.code == 0
    assert "none of them" in caplog.text and "num. shared" not in caplog.text
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == b"of another run"
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"dict.txt", "checkpoint_last.pt"}
