"""What training.py measures is a training that fairseq-train makes, and what it has measured is not lost."""

import logging
from argparse import Namespace
from importlib import import_module, reload
from pathlib import Path
from unittest import mock

import pytest
import training
from harness import commands

from tests.conftest import ROOT, command

# The paper's model and batch, for a second of one core: of options that are given twice the last one counts.
SMALLER = """--decoder-layers 1 --decoder-embed-dim 16 --decoder-ffn-embed-dim 16 --decoder-attention-heads 2
    --adaptive-input-cutoff 10,20 --adaptive-softmax-cutoff 10,20 --batch-size 2 --tokens-per-sample 16
    --max-update 4 --log-interval 1""".split()


@pytest.mark.parametrize("model", ["softmax", "delta"])
def test_the_training_that_is_measured_is_one_that_fairseq_makes_and_logs(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(ROOT)  # where --user-dir is
    monkeypatch.setattr(commands, "fairseq", command)
    data = training.prepare(tmp_path, training.QUICK_SETTINGS)
    options = Namespace(device="cpu", precision="fp32", backend="auto", quick=False)
    with mock.patch("logging.basicConfig") as configure:
        reload(import_module("fairseq_cli.train"))
    # The log is that of a process of its own.
    caplog.handler.setFormatter(logging.Formatter(configure.call_args.kwargs["format"]))
    command("train", str(data), *training.training_flags(model, training.SETTINGS, options), *SMALLER)
    speeds = training.words_per_second(caplog.text, warm_up=1)
    assert len(speeds) == 3 and min(speeds) > 0  # of updates 2 to 4
    with pytest.raises(ValueError, match="no speed in it after update 4"):
        training.words_per_second(caplog.text, warm_up=4)
