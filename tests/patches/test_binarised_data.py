"""Damaged binarised data is named in one line before it is read, and data that changes while it is read."""

import math
import os
import pickle
import struct
import weakref
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary, FairseqDataset, data_utils, iterators
from fairseq.data.indexed_dataset import (
    IndexedDatasetBuilder,
    MMapIndexedDataset,
    MMapIndexedDatasetBuilder,
    make_builder,
)
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.translation import TranslationTask
from torch.utils.data import TensorDataset

from fairseq_fastweights import command_line
from tests.conftest import age

binarised_data = pytest.importorskip("fairseq.binarised_data", reason="needs tools/build_fairseq.py's fairseq")
data_files = pytest.importorskip("fairseq.data_files", reason="needs tools/build_fairseq.py's fairseq")
check_split = binarised_data.check_split
pytestmark = pytest.mark.usefixtures("our_fairseq")

TYPES = range(40)
"""The dictionary's."""


@pytest.fixture(params=["mmap", "cached"])
def split(request, tmp_path) -> Path:
    """Three lines, the second empty, with the largest token that the dictionary has."""
    builder = make_builder(str(tmp_path / "train.bin"), request.param, vocab_size=40)
    for line in ([4, 5, 39], [], [0, 2]):
        builder.add_item(torch.tensor(line, dtype=torch.int64))
    builder.finalize(str(tmp_path / "train.idx"))
    return tmp_path / "train"


def test_whole_data_and_what_is_no_such_data_are_let_through(split):
    for prefix, types in ((split, TYPES), (split, None), (split.with_name("nothing"), TYPES)):
        check_split(str(prefix), types)
    assert len(data_utils.load_indexed_dataset(str(split), TYPES)) == 3


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda split: (split.with_name(name)).write_bytes(change(split.with_name(name).read_bytes()))


def pipe(name: str) -> Callable[[Path], object]:
    return lambda split: split.with_name(name).unlink() or os.mkfifo(split.with_name(name))


MANY = struct.pack("<Q", 3), struct.pack("<Q", 10**9)
WRONG: list[Callable[[bytes], bytes]] = [
    lambda x: x[:-8] + struct.pack("<q", -8),
    lambda x: x[:-8] + struct.pack("<q", 2**63 - 8),
    lambda x: x[:-7] + b"\1" + x[-6:],
    lambda x: x[:-8] + struct.pack("<q", 5),
    lambda x: x[:-24] + x[-16:-8] + x[-24:-16] + x[-8:],
    lambda x: x[:-24] + struct.pack("<3q", *(place + 2 for place in struct.unpack("<3q", x[-24:]))),
]
SPOILT: list[tuple[Callable[[Path], object], str]] = [
    (edit("train.idx", lambda x: x[:-1]), r"train.idx has [\d,]+ bytes; with the 3 entries that it says it must have"),
    (edit("train.idx", lambda x: x[:12]), "train.idx is cut short: it has 12 bytes, fewer than an index begins with"),
    (edit("train.idx", lambda x: b""), "train.idx is damaged: it begins with b''"),
    (edit("train.idx", lambda x: bytes(len(x))), "train.idx is damaged: it begins with "),
    (edit("train.idx", lambda x: x.replace(*MANY, 1)), "with the 1,000,000,000 entries that it says it must"),
    (edit("train.idx", lambda x: x[:8] + b"\7" + x[9:]), "train.idx is damaged: version "),
    (edit("train.idx", lambda x: x[:17] + b"\x77" + x[18:]), "train.idx is damaged: version 1 and type "),
    (edit("train.idx", lambda x: b"WHATEVER and its own"), "train.idx is damaged: it begins with b'WHATEVER'"),
    *((edit("train.idx", change), "idx is damaged: entry [012], or the one after it, is where") for change in WRONG),
    (edit("train.bin", lambda x: x + b"\4\0\0\0"), r"train.bin has \d+ bytes; by train.idx it must have (10|20): i"),
    (edit("train.bin", lambda x: x[:-1]), r"bin has \d+ bytes; by train.idx it must have (10|20): it is cut short"),
    (edit("train.bin", lambda x: b""), "train.bin has 0 bytes; by train.idx it must have"),
    (edit("train.bin", lambda x: x.replace(b"\5", b"\x37")), "bin has the token number 5[45]; the dictionary has 40"),
    (pipe("train.idx"), "train.idx is no regular file"),
    (pipe("train.bin"), "train.bin is no regular file"),
]


@pytest.mark.parametrize(("spoil", "message"), SPOILT, ids=range(len(SPOILT)))
def test_damage_is_named(split, spoil, message):
    age(split.parent)
    check_split(str(split), TYPES)  # data that was right before is looked at again
    spoil(split)
    with pytest.raises(ValueError, match=message) as error:
        check_split(str(split), TYPES)
    assert "\n" not in str(error.value) and str(split.parent) in str(error.value)


@pytest.mark.parametrize("task", [LanguageModelingTask, TranslationTask])
def test_a_folder_of_data_that_is_not_there_is_named(task, tmp_path):
    settings = Namespace(data=f"{tmp_path}/none:{tmp_path}", source_lang="a", target_lang="b")
    with pytest.raises(ValueError, match=f"^argument data: there is no folder {tmp_path}/none$") as error:
        task.setup_task(settings)
    assert command_line.told(error.value) == str(error.value)


def test_tokens_beyond_the_dictionary_are_named(split):
    with pytest.raises(ValueError, match="token number 39; the dictionary has 39 types, and numbers go from 0 to 38: "):
        check_split(str(split), range(39))
    if b"TNTIDX" in split.with_suffix(".idx").read_bytes():  # which has type 0 as 1
        edit("train.bin", lambda x: x.replace(b"\1", b"\0"))(split)
        with pytest.raises(ValueError, match="the token number -1; "):
            check_split(str(split), TYPES)


def test_a_flipped_bit_of_an_index_is_noticed(split):
    index = split.with_suffix(".idx")
    whole = index.read_bytes()
    for bit in range(0, 8 * len(whole), 5):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        index.write_bytes(damaged)
        binarised_data._check.cache_clear()
        with pytest.raises(ValueError, match=r"train\.(idx|bin) "):
            check_split(str(split), TYPES)


def test_items_of_several_dimensions(tmp_path, split):
    builder = IndexedDatasetBuilder(str(tmp_path / "shapes.bin"))
    for shape in ((2, 3), (), (0, 4)):
        builder.add_item(torch.ones(shape, dtype=torch.int64))
    builder.finalize(str(tmp_path / "shapes.idx"))
    check_split(str(tmp_path / "shapes"), TYPES)
    edit("shapes.idx", lambda x: x[:-8] + struct.pack("<q", 5))(split)  # still no numbers
    check_split(str(tmp_path / "shapes"), TYPES)
    edit("shapes.idx", lambda x: x[:-16] + struct.pack("<q", 1) + x[-8:])(split)
    with pytest.raises(ValueError, match="entry 2, or the one after it, is where no entry can be"):
        check_split(str(tmp_path / "shapes"), TYPES)
    places = [0, 2**62, -(2**63), -(2**62), 0]  # sizes whose sum overflows to none
    edit("shapes.idx", lambda x: x[:16] + struct.pack("<18q", 4, 4, 4, 4, *range(5), *places, *[2**62] * 4))(split)
    edit("shapes.bin", lambda x: b"")(split)
    with pytest.raises(ValueError, match=r"shapes\.idx is damaged: entry 0, or the one after it, is where no entry"):
        check_split(str(tmp_path / "shapes"), None)


def test_tokens_are_whole_numbers_of_their_type(tmp_path):
    builder = MMapIndexedDatasetBuilder(str(tmp_path / "train.bin"), dtype=np.float64)
    builder.add_item(torch.tensor([4.5, 5, math.inf]))
    builder.finalize(str(tmp_path / "train.idx"))
    check_split(str(tmp_path / "train"), None)
    with pytest.raises(ValueError, match=r"train\.bin holds numbers of type float64; tokens must be whole numbers"):
        check_split(str(tmp_path / "train"), TYPES)
    for impl in ("mmap", "cached"):
        builder = make_builder(str(tmp_path / "other.bin"), impl, vocab_size=40)
        for wrong in (math.nan, 4.5, 2.0**40, -9e9):
            with pytest.raises(
                ValueError, match=r"^the number \S+ cannot be kept as u?int\d+; it must be a whole number"
            ):
                builder.add_item(torch.tensor([4, wrong], dtype=torch.float64))
        builder.add_item(torch.tensor([4.0, 5]))


def test_sizes_of_parts_that_are_put_together_do_not_overflow(tmp_path):
    builder = make_builder(str(tmp_path / "train.bin"), "mmap", vocab_size=40)
    part = tmp_path / "part"
    with MMapIndexedDataset.Index.writer(f"{part}.idx", np.uint16) as index:
        index.write([2**30, 2**30, 1])
    part.with_suffix(".bin").write_bytes(b"")
    builder.merge_file_(str(part))
    builder.finalize(str(tmp_path / "train.idx"))
    assert MMapIndexedDataset.Index(str(tmp_path / "train.idx"))._pointers.tolist() == [0, 2**31, 2**32]


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
