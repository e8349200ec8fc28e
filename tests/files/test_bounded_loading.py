"""A file of torch.save is loaded within a small multiple of its size, or refused by name before it is loaded."""

import collections
import re
import struct
import time
import tracemalloc
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz_checkpoints
import numpy as np
import pytest
import torch
from fuzz_checkpoints import (
    archive,
    changes,
    equal,
    faults_of,
    made,
    name,
    number,
    opened,
    records_of,
    saved,
    shape,
    text,
)

from fairseq_fastweights.conversion.files.weight_files import load_safely
from fairseq_fastweights.files import integrity, zip_records
from fairseq_fastweights.files.bounded_loading import load, outline
from fairseq_fastweights.files.digests import with_digests
from fairseq_fastweights.files.integrity import num_updates
from fairseq_fastweights.files.zip_records import CheckpointError


class Call:
    """Unpickled, it is the result of a function call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


def itself() -> list[Any]:
    values: list[Any] = [1]
    values.append({"again": values})
    return values


def multiplied(levels: int) -> list[Any]:
    values: list[Any] = [0] * 9
    for _ in range(levels):
        values = [values] * 9
    return values


def nested(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def attributed() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.more = 1
    return tensor


LOST, NEEDLESS = "cannot be loaded; it is cut short, damaged or no checkpoint", ", which no checkpoint needs"
COSTLY = r"is refused: its values would take more than 1\d,\d+,\d+ bytes of memory"
# Values that Python writes in either format, and the message about each.
WRITTEN: dict[str, tuple[Callable[[], Any], str]] = {
    "bytes": (lambda: Call(bytearray, 10**8), f"is refused: it asks for .*bytearray{NEEDLESS}"),
    "a string": (lambda: ["x" * 10**5] * 99, r"is refused: of \d+,\d+ bytes, its values have 9,9\d\d,\d+ where repeat"),
    "a list within itself": (lambda: {"cfg": itself()}, "is refused: cfg.1.again holds itself"),
    "lists of one list": (lambda: {"cfg": multiplied(9)}, r"is refused: of \d+,\d+ bytes, its values have [\d,]+ wher"),
    "deep": (lambda: {"cfg": nested(101)}, r"is refused: cfg[.0]+ is nested more than 100 levels deep"),
    "a key of two lines": (lambda: {"a\nb": nested(101)}, r"is refused: 'a\\nb'[.0]+ is nested"),
    "one number": (
        lambda: {"w": torch.zeros(1).expand(2**20, 2**20)},
        r"is refused: w has shape \(1048576, 1048576\), [\d,]+ bytes; the file",
    ),
    "one row": (
        lambda: {"w": torch.zeros(2**10).as_strided((2**5, 2**30), (1, 0))},
        r"is refused: w has shape \(32, 1073741824\)",
    ),
    "no numbers": (
        lambda: {"w": torch.empty(10**12, device="meta")},
        f"is refused: it asks for torch._utils._rebuild_meta_tensor_no_storage{NEEDLESS}",
    ),
    "sparse": (lambda: {"w": torch.eye(2).to_sparse()}, f"is refused: it asks for torch._utils.*sparse.*{NEEDLESS}"),
    "conjugated": (lambda: {"w": torch.ones(2).cfloat().conj()}, rf"{LOST} \(a tensor .* conjugates\)"),
    "with an attribute": (lambda: attributed(), f"is refused: it asks for torch._tensor._rebuild_from_.*{NEEDLESS}"),
    "a counter": (lambda: collections.Counter("ab"), f"is refused: it asks for collections.Counter{NEEDLESS}"),
    "uninitialised": (lambda: Call(torch.Tensor, 10), f"is refused: it asks for torch.Tensor{NEEDLESS}"),
    "an uninitialised type": (lambda: Call(torch.HalfTensor, 9), f"is refused: it asks for torch.HalfTensor{NEEDLESS}"),
    "uninitialised bytes": (lambda: Call(torch.UntypedStorage, 9), rf"{LOST} \(a call of something else than a name\)"),
    "uninitialised numbers": (lambda: Call(torch.FloatStorage, 9), rf"{LOST} \(a call of something else than a name\)"),
    "a name": (lambda: {"w": Namespace}, f"is refused: w is _Name{NEEDLESS}"),
    "a float as a key": (lambda: {0.5: 1}, "is refused: a key in it is a float; it must be a string, a whole number o"),
    "a long tuple as a key": (lambda: {(1,) * 9: 1}, "is refused: a key in it is a tuple"),
    "tuples within a key": (lambda: {((1, 2),): 1}, "is refused: a key in it is a tuple"),
    "a long text within a key": (lambda: {("x" * 201,): 1}, "is refused: a key in it is a str"),
    "keys of one hash": (lambda: {i * (2**61 - 1): 0 for i in range(2, 9)}, "is refused: a key in it is a int"),
    "a set of one hash": (lambda: {i * (2**61 - 1) for i in range(2, 9)}, "is refused: a key in it is a int"),
    "many tuples as keys": (lambda: {(i, 0): 0 for i in range(1001)}, "is refused: a key in it is a tuple"),
    "objects": (lambda: np.array([{}, []], dtype=object), rf"{LOST} \(a NumPy array of type 'O8', where only numbers"),
    "a long number": (lambda: [1 << 3000], rf"{LOST} \(torch.save writes no opcode LONG4\)"),
}


def pickled(value: bytes) -> bytes:
    """An archive whose pickle is a dictionary of one value."""
    return archive(records_of(b"\x80\x02}" + text("x") + value + b"s.", {"0": bytes(16)}))


def tensor(
    size: Any = (4,), stride: Any = (1,), offset: int = 0, kind: str = "Float", key: str = "0", numel: int = 4
) -> bytes:
    storage = b"(" + text("storage") + name(f"torch.{kind}Storage") + text(key) + text("cpu") + number(numel) + b"tQ"
    shapes = b"".join(x if isinstance(x, bytes) else shape(x) for x in (size, stride))
    return name("torch._utils._rebuild_tensor_v2") + b"(" + storage + number(offset) + shapes + b"\x89}tR"


def copied(path: str, argument: bytes, call: bytes) -> bytes:
    """Many calls that would each copy one argument."""
    return name(path) + b"q\0" + argument + b"q\1](" + (b"h\0h\1" + call) * 2000 + b"e\x87"


def doubled(levels: int) -> bytes:
    """A tuple of two of a tuple of two of a tuple."""
    return b"K\1\x85q\0" + b"".join(bytes([0x68, i, 0x68, i, 0x86, 0x71, i + 1]) for i in range(levels))


def array(code: str, size: Any, data: str) -> bytes:
    kind = name("numpy.dtype") + text(code) + b"\x89\x88\x87R"
    content = name("_codecs.encode") + text(data) + text("latin1") + b"\x86R"
    made = name("numpy.core.multiarray._reconstruct") + name("numpy.ndarray") + shape((0,)) + content + b"\x87R"
    return made + b"(K\1" + (size if isinstance(size, bytes) else shape(size)) + kind + b"\x89" + content + b"tb"


HUGE = struct.pack("<Q", 2**62)
MANY = b"(" + b"".join(number(n + 300) for n in range(20_000)) + b"t"
LIST = MANY.replace(b"(", b"](", 1)[:-1] + b"e"
OPTIONS = b"}(" + b"".join(text(f"{n}") + b"N" for n in range(2000)) + b"u"
# Values of pickles that only an attacker writes, and the message about each.
FORGED: dict[str, tuple[bytes, str]] = {
    "copies of a shape": (copied("torch.Size", MANY + b"\x85", b"R"), rf"{LOST} \(a shape that is none\)"),
    "copies of a dictionary": (copied("collections.OrderedDict", LIST + b"\x85", b"R"), rf"{LOST} \(.*positional arg"),
    "copies of a set": (copied("__builtin__.set", LIST + b"\x85", b"R"), COSTLY),
    "copies of options": (copied("argparse.Namespace", OPTIONS, b"0)\x81h\1b").replace(b"h\0h\x010", b"h\0"), COSTLY),
    "copies of bytes": (copied("_codecs.encode", text("x" * 10**5) + text("latin1") + b"\x86", b"R"), COSTLY),
    "copies of a tensor": (
        name("torch._utils._rebuild_parameter") + b"q\0(" + tensor() + b"\x89}tq\1](" + b"h\0h\1R" * 35_000 + b"e\x86",
        COSTLY,
    ),
    "many lists": (b"](" + b"]" * 85_000 + b"e", COSTLY),
    "very deep": (b"]" * 10**4 + b"a" * (10**4 - 1), r"is refused: x(\.0)+ is nested more than 100 levels deep"),
    "a tuple of tuples as a key": (b"](" + doubled(40) + b"}h\x28Nse", "is refused: a key in it is a tuple"),
    "a tuple of tuples as a shape": (
        b"](" + doubled(40) + tensor(b"h\x28", b"h\x28") + b"e",
        rf"{LOST} \(a shape with a",
    ),
    "tuples for an array": (b"](" + doubled(40) + array("f8", b"h\x28", "") + b"e", rf"{LOST} \(a shape with a part"),
    "tuples of tuples": (b"](" + doubled(40) + b"e", r"is refused: of \d+,\d+ bytes, its values have [\d,]+ where"),
    "an array of 10 TB": (array("f8", (10**12,), "12345678"), rf"{LOST} \(a NumPy array of shape \(1000000000000,\) w"),
    "a number of 1 GB": (array("S1000000000", (1,), "x"), rf"{LOST} \(a NumPy array of type 'S1000000000', where only"),
    "an array of arrays": (array("1000000000f8", (1,), "x"), rf"{LOST} \(a NumPy array of type '1000000000f8', where"),
    "a number of a number": (b"\x96" + HUGE, rf"{LOST} \(torch.save writes no opcode BYTEARRAY8\)"),
    "a text that is not there": (b"X\xff\xff\xff\x7f", COSTLY),
    "a number for 64 GB of memory": (b"Nr\xff\xff\xff\x7f", rf"{LOST} \(value 2147483647 of the pickle is numbered"),
    "a frame": (b"\x95" + HUGE, rf"{LOST} \(torch.save writes no opcode FRAME\)"),
    "protocol 5": (b"\x80\x05N", rf"{LOST} \(torch.save writes no pickle protocol 5\)"),
    "an extension": (b"\x82\x01", rf"{LOST} \(torch.save writes no opcode EXT1\)"),
    "a name in two lines": (name("a\x1b[2J.b"), rf"is refused: it asks for 'a\\x1b\[2J.b'{NEEDLESS}"),
    "entries of a tensor": (tensor() + b"K\0K\0s", rf"{LOST} \(entries for Tensor, where a dictionary must be\)"),
    "values for a tuple": (b")Na", rf"{LOST} \(values for tuple, where a list must be\)"),
    "a state of a tensor": (tensor() + b")b", rf"{LOST} \(a state for Tensor\)"),
    "other attributes": (name("collections.OrderedDict") + b")R}" + text("get") + b"Nsb", rf"{LOST} \(a state for Ord"),
    "attributes that multiply": (
        name("collections.OrderedDict") + b")R}" + text("_metadata") + b"](" + doubled(40) + b"esb",
        r"is refused: of \d+,\d+ bytes, its values have [\d,]+ where",
    ),
    "more than its storage": (tensor((5,)), r"is refused: it has a tensor of shape \(5,\), for which its 16 bytes are"),
    "behind its storage": (tensor(offset=1), r"is refused: it has a tensor of shape \(4,\), for which its 16 bytes"),
    "far behind its storage": (tensor(stride=(2**59,)), r"is refused: it has a tensor of shape \(4,\), for which its"),
    "before its storage": (tensor(offset=-1), rf"{LOST} \(a shape with a part that is .* below 0"),
    "backwards": (tensor(stride=(-1,)), rf"{LOST} \(a shape with a part that is .* below 0"),
    "more numbers than there are": (tensor((2**40, 2**40), (0, 0)), r"is refused: it has a tensor of shape \(10995116"),
    "of 65 dimensions": (tensor((1,) * 65, (1,) * 65), rf"{LOST} \(a shape that is none\)"),
    "a larger storage": (tensor(numel=5), "is damaged: a tensor needs 20 bytes of its record data/0, which has 16"),
    "a smaller storage": (tensor((3,), numel=3), "is damaged: a tensor needs 12 bytes of its record data/0, which has"),
    "a storage of two types": (tensor() + tensor((8,), kind="Half", numel=8) + b"\x86", rf"{LOST} \(.*two types"),
    "no storage": (tensor(key="../data.pkl"), "is damaged: a tensor needs 16 bytes .* data/../data.pkl, which is miss"),
    "a tensor without storage": (
        name("torch._utils._rebuild_tensor_v2") + b"(NK\0))\x89}tR",
        rf"{LOST} \(a tensor with",
    ),
    "a storage": (tensor().split(b"_v2\n(")[1].split(b"K\0(", 1)[0], f"is refused: x is Storage{NEEDLESS}"),
    "two values": (b"NNs}", rf"{LOST} \("),
    "an open value": (b"(N", rf"{LOST} \("),
}


def check_refused(path: Path, content: bytes, says: str) -> None:
    """By all that read checkpoints, in one line, within the time and memory that are promised."""
    path.write_bytes(content)
    began = time.process_time()
    tracemalloc.start()
    with path.open("rb") as file, pytest.raises(CheckpointError, match=f"^{says}"):
        load(file)
    assert tracemalloc.get_traced_memory()[1] < fuzz_checkpoints.MULTIPLE * path.stat().st_size + fuzz_checkpoints.MORE
    tracemalloc.stop()
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))} {says}") as error:
        load_safely(path)
    assert "\n" not in str(error.value)
    whole, told = integrity.describe(path)
    assert not whole and re.match(rf"{re.escape(str(path))} {says}", told)
    assert num_updates(path) == -1
    assert time.process_time() - began < 20  # with tracing


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", WRITTEN)
def test_a_value_larger_than_the_file_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    make, says = WRITTEN[kind]
    for zipped in (True, False):
        check_refused(tmp_path / "model.pt", saved(make(), zipped), says)


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_pickle_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    value, says = FORGED[kind]
    check_refused(tmp_path / "model.pt", pickled(value), says)


STATE = {"model": {"w": torch.arange(4.0), "v": torch.ones(2, dtype=torch.int64)}, "cfg": {"lr": [0.25]}}
# How an archive lies, by `fuzz_checkpoints.changes`, and the message about one of its records; None: nothing is wrong.
LIES = {
    **dict.fromkeys(("none", "with zip64")),
    "in capitals": "its record .* has no|its records are not in one",
    "of another name in the header": "its record .* is called",
    "of another folder": "its records are not in one folder, or two have the same name",
    **dict.fromkeys(("compressed", "said to be compressed", "unpacked larger"), "its record .* is compressed"),
    **dict.fromkeys(("encrypted", "a folder"), "its record .* is encrypted or a folder; torch.save writes neither"),
    "repeated": "its record .* overlaps another, or the directory",
    **dict.fromkeys(("elsewhere", "without a header"), "its record .* is not where the directory says"),
    **dict.fromkeys(
        ("of another size in the header", "larger in the directory", "with an extra"), "its record .* has an"
    ),
    **dict.fromkeys(
        ("with another zip64", "with a comment", "with another count", "with another place"), "the directory"
    ),
    **dict.fromkeys(
        ("with another size", "with two directories", "with a comment that is missing"), "the directory at its end"
    ),
    "with a hidden directory": "the directory at its end",
    "after something": "no checkpoint",
}


@pytest.mark.parametrize("lie", LIES)
def test_an_archive_with_records_that_programs_find_differently_is_refused(tmp_path: Path, lie: str) -> None:
    path, said = tmp_path / "model.pt", set()
    for seed in range(6):
        change = changes(fuzz_checkpoints.Random(seed))[lie]
        path.write_bytes(archive(opened(saved(STATE)), change))
        try:
            loaded = load_safely(path)
        except ValueError as error:
            said.add(str(error))
        else:
            assert equal(STATE, loaded)
    assert bool(said) is (LIES[lie] is not None)
    assert not said or any(re.search(str(LIES[lie]), error) for error in said), said
    assert all("damaged" in error and "\n" not in error for error in said)


def test_two_names_that_differ_in_capitals_are_refused(tmp_path: Path) -> None:
    """torch finds a record whatever its capitals, Python does not."""
    path = tmp_path / "model.pt"
    path.write_bytes(archive([("archive/DATA.PKL", b"\x80\x02N."), *records_of(b"\x80\x02K\1.", {})]))
    with path.open("rb") as file, pytest.raises(CheckpointError, match=r"is damaged: .* two have the same name"):
        zip_records.records_in(file)
    path.write_bytes(archive([("archive/DATA.PKL", b"\x80\x02N.")]))
    with path.open("rb") as file, pytest.raises(CheckpointError, match=r"it has no record data\.pkl"):
        load(file)


@pytest.mark.parametrize("lie", [lambda keys: [], lambda keys: keys * 2, lambda keys: [*keys, "9"], lambda keys: ["9"]])
def test_the_old_format_has_the_numbers_of_each_tensor_once(
    tmp_path: Path, lie: Callable[[list[str]], list[str]]
) -> None:
    """Missing numbers of a tensor would be left over from other memory."""
    path, content = tmp_path / "model.pt", saved({"w": torch.ones(4)}, zipped=False)
    start = content.rindex(b"\x80\x02]q\x00")
    [key] = re.findall(rb"(\d{6,})", content[start:-24])
    keys = b"".join(map(text, lie([key.decode()])))
    path.write_bytes(content[:start] + b"\x80\x02](" + keys + b"e." + content[-24:] * 2)
    with path.open("rb") as file, pytest.raises(CheckpointError, match="is damaged: its storages are not those"):
        load(file)
    path.write_bytes(content.replace(struct.pack("<q", 4), struct.pack("<q", 5)))
    with path.open("rb") as file, pytest.raises(CheckpointError, match=rf"its storage {key.decode()} has 5 numbers"):
        load(file)
    path.write_bytes(content[:start].replace(b"K\x04", b"J" + struct.pack("<i", 10**8)) + content[start:])
    with (
        path.open("rb") as file,
        pytest.raises(CheckpointError, match="its tensors have at least 400,000,000 bytes; the"),
    ):
        load(file)


def many_kinds() -> dict[str, Any]:
    tied = torch.arange(6.0).view(2, 3)
    dtypes = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16")
    dtypes += ("int8", "uint8", "uint16", "uint32", "uint64", "bool", "complex64")
    return {
        "model": torch.nn.Linear(3, 4).state_dict(),
        "types": {kind: torch.ones(3).to(getattr(torch, kind)) for kind in dtypes},
        "shared": [tied, tied.t(), tied[1:], tied.view(-1)[::2], tied],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "empty": [torch.zeros(0, 3), torch.ones(2, 0, 3)[1:], torch.tensor(4)],
        "few": torch.zeros(1).expand(90, 100),
        "args": Namespace(lr=[0.1], betas="(0.9, 0.98)"),
        "plain": [
            None,
            True,
            -1,
            2**40,
            -(10**30),
            0.5,
            "é",
            ("a", (1,)),
            {1, "a"},
            b"\0\xff",
            {3: 1, None: 2, ("a", 1): 3},
        ],
        "torch": [torch.Size((2, 3)), torch.device("cuda:1"), torch.float16],
        "numpy": [np.arange(6).reshape(2, 3), np.float64(2.5), np.array(["1.5"]).astype(">f4")],
        "groups": [{"betas": (0.9, 0.98), "name": "x" * 1000} for _ in range(100)],
        "letters": list("a" * 12_000) + [()] * 12_000,
        "deep": nested(90),
        "order": collections.OrderedDict(a=multiplied(1)),
    }


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("mapped", [True, False])
def test_every_kind_of_value_in_checkpoints_is_loaded(tmp_path: Path, zipped: bool, mapped: bool) -> None:
    path, content = tmp_path / "model.pt", many_kinds()
    path.write_bytes(saved(with_digests(content), zipped))
    with path.open("rb") as file:
        state = load(file, mapped)
        integrity.check_loaded(file, path, state)
        assert equal(content, state)
        assert state["model"]._metadata == content["model"]._metadata
        first, *others = state["shared"]
        first += 1
        assert others[-1] is first and all(x.untyped_storage()._cdata == first.untyped_storage()._cdata for x in others)
        assert equal(content, load_safely(path))  # the file is as it was
        assert outline(file)["plain"] == content["plain"] and outline(file)["few"] is None
    assert integrity.why_damaged(path) is None


@pytest.mark.parametrize("part", range(4))
def test_random_checkpoints_are_loaded_right_or_refused_in_one_line(tmp_path: Path, part: int) -> None:
    """As `tools/fuzz_checkpoints.py` does with more of them."""
    cases = (made(53, index) for index in range(50 * part, 50 * part + 50))
    assert [fault for case in cases for fault in faults_of(case, tmp_path / "model.pt")] == []
