"""What training.py measures is a training that fairseq-train makes, and what it has measured is not lost."""

import io
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


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "fairseq", command)
        return training.prepare(tmp_path_factory.mktemp("training"), training.QUICK_SETTINGS)


@pytest.mark.parametrize("model", ["softmax", "delta"])
def test_the_training_that_is_measured_is_one_that_fairseq_makes_and_logs(
    data: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # where --user-dir is
    options = Namespace(device="cpu", precision="fp32", backend="auto", quick=False)
    flags = training.training_flags(model, training.SETTINGS, options)
    with mock.patch("logging.basicConfig") as configure:
        reload(import_module("fairseq_cli.train"))
    log = io.StringIO()  # as in a process of its own
    handler = logging.StreamHandler(log)
    handler.setFormatter(logging.Formatter(configure.call_args.kwargs["format"]))
    logging.getLogger().addHandler(handler)
    try:
        command("train", str(data), *flags, *SMALLER)
    finally:
        logging.getLogger().removeHandler(handler)
    speeds = training.words_per_second(log.getvalue(), warm_up=1)
    assert len(speeds) == 3 and min(speeds) > 0  # of updates 2 to 4
    with pytest.raises(ValueError, match="no speed in it after update 4"):
        training.words_per_second(log.getvalue(), warm_up=4)
