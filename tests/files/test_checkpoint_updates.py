"""The number of updates of a checkpoint is read from any file, and nothing else happens."""

import pickle
import time
import zipfile
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fairseq_fastweights.files.integrity import num_updates


def state(number: object = 7, **others: Any) -> dict[str, Any]:
    extra = {"train_iterator": {"epoch": 1}, "metrics": {"bleu": np.float64(3), "counts": np.arange(3)}}
    return {
        "args": Namespace(lr=[0.1]),
        "cfg": {"model": Namespace(device=torch.device("cpu")), "names": {1, 2}},
        "model": OrderedDict(w=torch.ones(5)),
        "optimizer_history": [{"num_updates": 3}, {"num_updates": number}],
        "extra_state": extra,
        **others,
    }


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("content", "number"),
    [
        (state(), 7),
        (state(0), 0),
        (state(10**30), 10**30),
        *[(state(wrong), -1) for wrong in (True, "7", None, torch.tensor(7))],
        (state(extra_state={}), -1),  # of a crash: without a place in the data
        (state(optimizer_history=[]), -1),
        ([1], -1),
        (Hostile, -1),  # which is not loaded
    ],
)
def test_it_is_read_from_every_format_that_is_loaded(tmp_path, content, number, zipped):
    if content is Hostile:
        content = state(more=Hostile(tmp_path / "witness"))
    torch.save(content, tmp_path / "file.pt", _use_new_zipfile_serialization=zipped)
    assert num_updates(tmp_path / "file.pt") == number
    assert not (tmp_path / "witness").exists()


def zipped(content: bytes, how: int = zipfile.ZIP_STORED) -> Any:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w", how) as archive:
            archive.writestr("archive/data.pkl", content)

    return write


FILES = {
    "none": lambda path: None,
    "folder": lambda path: path.mkdir(),
    "empty": lambda path: path.touch(),
    "text": lambda path: path.write_text("text"),
    "no pickle": zipped(b"x"),
    "compressed": zipped(pickle.dumps(state(model={})), zipfile.ZIP_DEFLATED),
    "a number for 64 GB of memory": zipped(b"\x80\x02Nr\xff\xff\xff\x7f0" + pickle.dumps([1])),
    "bytes that are not there": zipped(b"\x80\x05\x96" + (2**62).to_bytes(8, "little") + b"."),
}


@pytest.mark.parametrize("file", FILES)
def test_what_is_no_checkpoint_has_none_and_costs_nothing(tmp_path, file):
    FILES[file](tmp_path / "file.pt")
    started = time.process_time()  # of this process, however busy the machine is
    assert num_updates(tmp_path / "file.pt") == -1
    assert time.process_time() - started < 5
