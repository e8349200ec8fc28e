"""Data that changes while it is read is named, whatever reads it; data that another one is renamed over is not."""

import os
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary, FairseqDataset, data_utils, iterators
from fairseq.data.indexed_dataset import make_builder
from torch.utils.data import TensorDataset

from tests.conftest import age

data_files = pytest.importorskip("fairseq.data_files", reason="needs the fairseq of tools/build_fairseq.py --force")
pytestmark = pytest.mark.usefixtures("our_fairseq")

WORDS = Dictionary(extra_special_symbols=[f"w{number}" for number in range(36)])
LINES = [torch.tensor(line, dtype=torch.int32) for line in ([4, 5, 39], [], [7] * 9)]
IN_MEMORY = ("raw",)


@pytest.fixture(autouse=True)
def nothing_else_is_open(monkeypatch):
    """Other tests have left data that has changed."""
    monkeypatch.setattr(data_files, "_opened", weakref.WeakSet())


def written(folder: Path, impl: str) -> Path:
    """The file with the tokens of a split with LINES."""
    text = [[WORDS[number] for number in line] for line in LINES]
    if impl == "raw":
        (folder / "train").write_text("".join(f"{' '.join(line)}\n" for line in text))
        return folder / "train"
    builder = make_builder(str(folder / "train.bin"), impl, vocab_size=len(WORDS))
    for line in LINES:
        builder.add_item(line)
    builder.finalize(str(folder / "train.idx"))
    return folder / "train.bin"


def read(data: FairseqDataset) -> list[list[int]]:
    """All lines, none from the cache of the last ones."""
    type(data).__getitem__.cache_clear()
    if getattr(data, "supports_prefetch", False):
        data.cache_index.clear()
        data.prefetch(range(len(data)))
    return [data[number].tolist() for number in range(len(data))]


def others(path: Path) -> bytes:
    """As many other bytes, of the same tokens."""
    content = path.read_bytes()
    return content[2:] + content[:2]


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(others(path))


def replace(path: Path) -> None:
    path.with_suffix(".new").write_bytes(others(path))
    path.with_suffix(".new").replace(path)


def cut(path: Path) -> None:
    os.truncate(path, 4)


CHANGES: dict[Callable[[Path], object], str] = {
    cut: r"it had \d+ bytes and has 4; data must stay as it is$",
    overwrite: r"its \d+ bytes are others; ",
    os.utime: "",
    lambda path: path.write_bytes(path.read_bytes()): "",
    replace: "",
}


@pytest.mark.parametrize("change", CHANGES, ids=["cut", "overwritten", "touched", "written again", "replaced"])
@pytest.mark.parametrize("impl", ["mmap", "cached", "lazy", "raw"])
def test_what_changes_open_data_is_noticed_and_what_does_not_is_not(tmp_path, impl, change):
    path = written(tmp_path, impl)
    age(tmp_path)
    data = data_utils.load_indexed_dataset(str(tmp_path / "train"), WORDS, impl)
    before, sent = read(data), pickle.dumps(data)
    assert before == [line.tolist() + [WORDS.eos()] * (impl == "raw") for line in LINES]
    change(path)
    message = rf"^{path} has changed while it was read: "
    if CHANGES[change]:
        if impl in IN_MEMORY:
            assert read(data) == before
        else:
            with pytest.raises(ValueError, match=message + CHANGES[change]):
                read(data)
        assert path.name in data_files.first_change() and data_files.first_change() is None
    else:
        assert read(data) == before and data_files.first_change() is None
    if CHANGES[change] or change is replace:  # in another process it is opened by its name
        with pytest.raises(ValueError, match=message + (CHANGES[change] or CHANGES[overwrite])):
            pickle.loads(sent)
    else:
        assert read(pickle.loads(sent)) == before


def test_an_index_that_changes_is_noticed_though_it_is_in_memory(tmp_path):
    written(tmp_path, "mmap")
    data = data_utils.load_indexed_dataset(str(tmp_path / "train"), WORDS, "mmap")
    before = read(data)
    cut(tmp_path / "train.idx")
    assert read(data) == before and "train.idx has changed" in data_files.first_change()


def test_data_that_lacks_what_its_index_says_and_pipes_are_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"abcd")
    file = data_files.DataFile(str(tmp_path / "file"))
    assert file.read(np.uint16, 1, 2).tobytes() == b"cd" and len(file.read(np.uint16, 0, 4)) == 0
    with pytest.raises(ValueError, match="file ends where its index says that there is more"):
        file.read(np.uint16, 2, 1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is no regular file"):
        data_files.DataFile(str(tmp_path / "pipe"))


FILES = {"a/train.idx": data_files.Content(9, 1), "a/train.bin": data_files.Content(8, 2)}
OTHERS = {"b/train.idx": data_files.Content(9, 1), "b/train.bin": data_files.Content(7, 2)}


@pytest.mark.parametrize(
    ("files", "former", "done", "message"),
    [
        (FILES, FILES, 3, None),
        ({f"moved/{name}": content for name, content in FILES.items()}, FILES, 3, None),
        (FILES, {}, 3, None),  # of a checkpoint of before
        (OTHERS, FILES, 3, r"^b/train\.bin is not what .* had 8 bytes and has 7; .* --reset-dataloader"),
        ({**FILES, "a/train1.bin": data_files.Content(1, 1)}, FILES, 3, r"within an epoch of 2 files; .*--reset-datal"),
        (OTHERS, FILES, 0, None),  # another part of the data, for another epoch
        (FILES, {}, 4, r"^a/train\.idx, a/train\.bin: the checkpoint stopped after 4 batches .*--reset-dataloader"),
    ],
)
def test_a_run_goes_on_with_the_data_that_it_stopped_in(files, former, done, message, caplog):
    taken_up = iterators.EpochBatchIterator(TensorDataset(torch.arange(4)), list, batch_sampler=[[0], [1], [2], [3]])
    taken_up.files = files
    state = {"version": 2, "epoch": 1, "iterations_in_epoch": done, "files": data_files.kept(former)}
    if message is None:
        taken_up.load_state_dict(state)
        assert not caplog.records
        return
    with pytest.raises(ValueError, match=message) as error:
        taken_up.load_state_dict(state)
    assert "\n" not in str(error.value)


def test_between_two_epochs_or_two_runs_other_data_is_told(caplog):
    changed, former = {**FILES, "a/train.bin": data_files.Content(7, 3)}, data_files.kept(FILES)
    data_files.compare(changed, former, in_epoch=False, goes_on=True)
    data_files.compare(OTHERS, former, in_epoch=True, goes_on=False)
    assert caplog.messages == [
        "a/train.bin has changed since the checkpoint: it had 8 bytes and has 7",
        "b/train.bin is not what the checkpoint stopped in the middle of: it had 8 bytes and has 7; as much of it is "
        "left out as was read, unless --reset-dataloader is given",
    ]
