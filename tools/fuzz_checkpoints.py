"""Writes checkpoints at random, valid ones and attacks, and checks that each is loaded right or refused in one line.

    python tools/fuzz_checkpoints.py [--count N] [--seed N] [--only N]

A file is an archive or in the format from before torch 1.6. Its pickle is torch.save's of random values, or
a program from a grammar of opcodes, names and arguments; its records and its directory are whole, or lie. Whatever is
loaded must be the value that was written, or, of a program, the value by torch's own loader. Each function that
reads checkpoints must end within a second of CPU time and within 4 times the file's size and 32 MiB of memory.
"""

from __future__ import annotations

import argparse
import functools
import io
import itertools
import math
import pickle
import random
import re
import resource
import signal
import struct
import sys
import tempfile
import time
import warnings
import zipfile
import zlib
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairseq_fastweights.files.bounded_loading import load
from fairseq_fastweights.files.digests import with_digests
from fairseq_fastweights.files.integrity import check_loaded, describe, num_updates, why_damaged
from fairseq_fastweights.files.text_files import FileError
from fairseq_fastweights.files.zip_records import CheckpointError

SECONDS, MULTIPLE, MORE = 1.0, 4, 32 * 2**20
MOST = {"seconds": 0.0, "mib": 0.0}
"""The longest time, and the most memory beyond the multiple of the size."""
HUNG = 20
"""Seconds after which a case is given up, as by an endless loop."""
Random = random.Random
Records = list[tuple[str, bytes]]


@dataclass(frozen=True)
class Case:
    """A file, and the value that was written, or of a program none: torch's own loader says its value."""

    kind: str
    content: bytes
    value: Any = None
    is_program: bool = False


# Values and pickles.


def text(value: str) -> bytes:
    return pickle.dumps(value, 2)[2:-3]  # without head, memo and end


def number(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def shape(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def name(path: str) -> bytes:
    module, _, last = path.rpartition(".")
    return f"c{module}\n{last}\n".encode()


def random_value(rng: Random, depth: int = 0) -> Any:
    """The contents that a checkpoint may have."""
    plain = (
        rng.choice((None, True, False, 0, -1, 255, 2**31, -(2**63), 10**30, 0.5, math.inf, "", "lr", "é😀")),
        "x" * rng.randrange(300),
        rng.choice((torch.float16, torch.device("cpu"), torch.Size((2, 3)), {1, "a"}, b"\0\xff")),
        *(random_tensor(rng) for _ in range(2)),
        rng.choice((np.arange(6).reshape(2, 3), np.float64(2.5), np.array([1.5], dtype=">f4"))),
    )
    if depth < 4 and rng.random() < 0.6:
        parts = [random_value(rng, depth + 1) for _ in range(rng.randrange(5))]
        keys = rng.sample(("a", "b.weight", 3, -5, None, ("t", 1), "ü"), len(parts))
        mapping = dict(zip(keys, parts, strict=True))
        options = Namespace(**{f"option{i}": part for i, part in enumerate(parts)})
        return rng.choice((parts, tuple(parts), mapping, OrderedDict(mapping), options, [parts, parts]))
    return rng.choice(plain)


def random_tensor(rng: Random) -> torch.Tensor:
    sizes = [rng.randrange(4) for _ in range(rng.randrange(4))]
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint16, torch.float8_e4m3fn)
    tensor = torch.tensor([rng.randrange(2) for _ in range(math.prod(sizes))]).view(sizes).to(rng.choice(dtypes))
    views = [
        tensor,
        tensor.t() if len(sizes) == 2 else tensor,
        tensor[1:] if sizes else tensor,
        tensor.expand(3, *sizes),
    ]
    return rng.choice([*views, torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point())])


def random_state(rng: Random) -> Any:
    tied = random_tensor(rng)
    model = OrderedDict((f"layer{i}.weight", random_tensor(rng)) for i in range(rng.randrange(4)))
    state = {
        "args": Namespace(lr=[0.25], data="x") if rng.random() < 0.5 else None,
        "cfg": random_value(rng),
        "model": model | {"tied": tied, "tied2": tied, "linear": torch.ones(2, 3)},
        "optimizer_history": [{"num_updates": rng.randrange(100)}],
        "extra_state": {"train_iterator": {"epoch": 1}, "more": random_value(rng)},
    }
    return with_digests(state) if rng.random() < 0.7 else state


# Programs: each piece leaves one value on the stack.

ALLOWED = """
    collections.OrderedDict argparse.Namespace fairseq.meters.AverageMeter torch.Size torch.device __builtin__.set
    torch._utils._rebuild_tensor_v2 torch._utils._rebuild_tensor_v3 torch._utils._rebuild_parameter _codecs.encode
    numpy.core.multiarray._reconstruct numpy.core.multiarray.scalar numpy.dtype numpy.ndarray
    torch.FloatStorage torch.storage.UntypedStorage torch.float32
""".split()
OTHERS = """
    collections.Counter collections.defaultdict __builtin__.bytearray builtins.complex builtins.eval posix.system
    torch.Tensor torch.FloatTensor torch.UntypedStorage torch.storage.TypedStorage torch.nn.parameter.Parameter
    torch._utils._rebuild_meta_tensor_no_storage torch._utils._rebuild_qtensor torch._utils._rebuild_sparse_tensor
    torch._utils._rebuild_device_tensor_from_numpy torch._utils._rebuild_wrapper_subclass
    torch._tensor._rebuild_from_type_v2 torch.serialization._get_layout
""".split()


class Program:
    """A pickle of protocol 2 whose value is a dictionary.

    Args:
        rng: draws its parts.
        storages: the sizes of those that tensors may name.
        view: that of a storage, where the format says it.
    """

    def __init__(self, rng: Random, storages: dict[str, int], view: bytes) -> None:
        self.rng, self.storages, self.view, self.memo = rng, storages, view, 0
        self.used = dict[str, None]()

    def written(self) -> bytes:
        others = (self.call, self.repeated, self.key, self.array, self.doubled, self.deep, self.opcode, self.itself)
        pieces = [*[self.plain] * 6, *[self.tensor] * 6, *others, self.collisions, self.built]
        content = b"\x80\x02}("
        for i in range(self.rng.randrange(1, 4)):
            content += text(f"entry{i}") + self.rng.choice(pieces)()
        return content + b"u" + (b"." if self.rng.random() < 0.98 else b"")

    def put(self) -> bytes:
        # A few indices are wrong, or ask for a memo of gigabytes.
        self.memo += 1
        index = self.memo - 1 if self.rng.random() < 0.99 else self.rng.choice((0, 2**20, 2**31 - 1, 2**32 - 1))
        return b"q" + bytes([index]) if index < 256 else b"r" + struct.pack("<I", index)

    def get(self) -> bytes:
        """The last value that was put into the memo."""
        index = self.memo - 1
        return b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)

    def many(self) -> int:
        return self.rng.choice((1, 2, 10, 10, 100, 100, 3000, 30_000))

    def plain(self) -> bytes:
        plain = (None, True, False, 0.5, (), self.rng.randrange(-(10**10), 10**10))
        pickles = [pickle.dumps(value, 2)[2:-1] for value in plain]
        return self.rng.choice([*pickles, b"]", b"}", text("x" * self.many()), shape((1, 2))])

    def storage(self) -> bytes:
        key, size = self.rng.choice(list(self.storages.items()))
        kind, width = self.rng.choice((("Float", 4), ("Float", 4), ("Half", 2), ("Byte", 1)))
        size //= width
        size = size if self.rng.random() < 0.9 else self.rng.choice((0, size + 1, 10**9, -1, 2**62))
        key = key if self.rng.random() < 0.95 else self.rng.choice(("9", "../version", ""))
        self.used[key] = None
        # The persistent id of a storage: its kind, key, device and number of elements.
        parts = (text("storage"), name(f"torch.{kind}Storage"), text(key), text("cpu"), number(size), self.view)
        return b"(" + b"".join(parts) + b"tQ"

    def tensor(self) -> bytes:
        sizes = self.rng.choice(((2, 2), (), (0, 5), (1,), (4,), (10**9,), (2**20, 2**20), (2**40, 2**40), (1,) * 70))
        strides = tuple(self.rng.choice((0, 1, 1, 2, 2**40, -1)) for _ in sizes)
        offset = self.rng.choice((0, 0, 0, 1, 100, -1, 2**61))
        if self.rng.random() < 0.7:
            valid = (((2, 2), (1, 2), 0), ((), (), 3), ((4,), (0,), 1), ((0, 3), (3, 1), 0))
            sizes, strides, offset = self.rng.choice(valid)
        content = name("torch._utils._rebuild_tensor_v2") + b"(" + self.storage() + number(offset)
        return content + shape(sizes) + shape(strides) + b"\x89" + name("collections.OrderedDict") + b")RtR"

    def call(self) -> bytes:
        path = self.rng.choice(ALLOWED + OTHERS)
        arguments = (self.plain, lambda: number(10**9), lambda: shape((10**9,)), self.tensor, lambda: name(path))
        return name(path) + b"(" + b"".join(self.rng.choice(arguments)() for _ in range(self.rng.randrange(4))) + b"tR"

    def repeated(self) -> bytes:
        """Calls that would each copy an argument that the file holds once."""
        numbers = number(300) * 5000
        options = b"}(" + b"".join(text(f"{i}") + b"N" for i in range(3000)) + b"u"
        calls = [
            ("_codecs.encode", text("x" * 20_000) + text("latin1") + b"\x86", b"R"),
            ("__builtin__.set", b"](" + numbers + b"e\x85", b"R"),
            ("torch.Size", b"(" + numbers + b"t\x85", b"R"),
            ("argparse.Namespace", options, b""),
            ("torch._utils._rebuild_parameter", b"(" + self.tensor() + b"\x89}t", b"R"),
            (self.rng.choice(ALLOWED + OTHERS), b"](" + numbers + b"e\x85", self.rng.choice((b"R", b"\x81"))),
            (self.rng.choice(ALLOWED + OTHERS), b"(" + numbers + b"t", self.rng.choice((b"R", b"\x81", b"b"))),
        ]
        path, argument, call = self.rng.choice(calls)
        content = name(path) + self.put()
        function = self.get()
        content += argument + self.put()
        last = self.get()
        again = function + last + call if call else function + b")\x81" + last + b"b"  # an empty object, then its state
        return content + b"\x86](" + again * self.many() + b"e\x86"

    def key(self) -> bytes:
        keys = [number(2**61 - 1), b"G" + struct.pack(">d", 1.5), b"(" + text("x" * 1000) + b"t", b"]", shape((1,) * 9)]
        keys += [number(-1), b"N", text("x"), shape((1, 2)), b"(" + shape((1, 2)) + b"t", self.tensor()]
        return b"}" + self.rng.choice(keys) + b"Ns"

    def doubled(self) -> bytes:
        """Tuples or lists of tuples or lists, each twice: a value, a key, a shape."""
        content = text("x" * self.many()) + self.put()
        for _ in range(self.rng.choice((2, 9, 40))):
            last = self.get() * 2
            content += self.rng.choice((last + b"\x86", b"](" + last + b"e")) + self.put()
        last = self.get()
        content = b"](" + content
        uses = [b"", b"}" + last + b"Ns", name("torch.Size") + last + b"\x85R", b"}" + last + b"Ns" + last]
        uses += [name("torch._utils._rebuild_tensor_v2") + b"(" + self.storage() + b"K\0" + last * 2 + b"\x89}tR"]
        return content + self.rng.choice(uses) + b"e"

    def deep(self) -> bytes:
        n = self.rng.choice((5, 99, 3000))
        return self.rng.choice((b"]" * n + b"a" * (n - 1), b"N" + b"\x85" * n, b"(" * n + b"t" * n))

    def itself(self) -> bytes:
        content = b"]" + self.put()
        return content + self.get() + b"a"

    def opcode(self) -> bytes:
        """Opcodes that torch.save never writes, or with lengths beyond the file."""
        codes = [code + struct.pack("<Q", 2**62) for code in (b"\x96", b"\x8e", b"\x8d", b"\x95")]
        codes += [code + b"\xff\xff\xff\x7f" for code in (b"\x8b", b"B", b"T")]
        codes += [b"\x8b" + bytes(4), b"X\xff\xff\xff\xff", b"I" + b"9" * 9000 + b"\n"]
        codes += b"\x82\1 Ptorch\n ios\nsystem\n (co\nx\no \x94 \x93 2 \x8f \x91 \x80\5 \xff".split(b" ")
        return self.rng.choice(codes) + b"N" * self.rng.randrange(2)

    def collisions(self) -> bytes:
        """Keys that all have the same hash."""
        # Python hashes integers modulo 2**61 - 1.
        keys = (number(i * (2**61 - 1)) for i in range(1, self.many()))
        return b"}(" + b"".join(key + b"N" for key in keys) + b"u"

    def array(self) -> bytes:
        sizes = self.rng.choice(((2,), (10**12,), (-1, -2), (0, 2**62), (1,) * 99))
        kind = self.rng.choice(("f8", "i8", "O", "V10", "1000000000f8", "f8,f8", "S1000000000", "<f8"))
        # The arguments by which NumPy pickles arrays and scalars: a dtype, and its bytes as a Latin-1 text.
        dtype = name("numpy.dtype") + text(kind) + b"\x89\x88\x87R"
        data = name("_codecs.encode") + text("\0" * self.rng.choice((16, 0, 8))) + text("latin1") + b"\x86R"
        if self.rng.random() < 0.3:
            return name("numpy.core.multiarray.scalar") + dtype + data + b"\x86R"
        made = name("numpy.core.multiarray._reconstruct") + name("numpy.ndarray") + shape((0,)) + data + b"\x87R"
        return made + b"(K\1" + shape(sizes) + dtype + b"\x89" + data + b"tb"

    def built(self) -> bytes:
        states = [b"}" + key + b"s" for key in (text("a") + b"N", number(1) + b"N", text("_metadata") + b"}")]
        makes = [name("argparse.Namespace") + b")\x81", name("collections.OrderedDict") + b")R", self.tensor()]
        return self.rng.choice([*makes, b"]", b"}"]) + self.rng.choice([*states, b"N", self.plain()]) + b"b"


# Files.

Change = Callable[[dict[str, Any]], None]


def archive(records: Records, change: Change = lambda _: None) -> bytes:
    """An archive; `change` is given each record as it will be written, and then the end."""
    content, directory, count = b"", b"", 0
    for title, data in records:
        record: dict[str, Any] = {"header_name": title.encode(), "name": title.encode(), "data": data}
        record |= {"size": len(data), "packed": len(data), "header_size": len(data), "offset": len(content)}
        record |= {"flags": 0, "method": 0, "attributes": 0, "extra": b"", "times": 1, "header_magic": b"PK\3\4"}
        record["crc"] = zlib.crc32(data)
        change(record)
        kind, header = (record["flags"], record["method"], 0, 0, record["crc"]), record["header_name"]
        # Of header and directory: version, flags, method, time, date, CRC, packed and real size, lengths of texts.
        sizes = record["header_size"], record["header_size"]
        content += record["header_magic"] + struct.pack("<5H3I2H", 20, *kind, *sizes, len(header), 0)
        content += header + record["data"]
        lengths = len(record["name"]), len(record["extra"]), 0
        sizes, ends = (record["packed"], record["size"]), (0, 0, record["attributes"], record["offset"])
        entry = struct.pack("<6H3I5H2I", 20, 20, *kind, *sizes, *lengths, *ends)
        directory += (b"PK\1\2" + entry + record["name"] + record["extra"]) * record["times"]
        count += record["times"]
    end: dict[str, Any] = {"count": count, "size": len(directory), "offset": len(content), "directory": directory}
    end |= {"comment": b"", "missing": 0, "before": b"", "prefix": b""}
    change(end)
    numbers = end["count"], end["count"], end["size"], end["offset"], len(end["comment"]) + end["missing"]
    last = b"PK\5\6" + struct.pack("<4HIIH", 0, 0, *numbers)
    return b"".join((end["prefix"], content, end["directory"], end["before"], last, end["comment"]))


def records_of(pickle: bytes, storages: dict[str, bytes]) -> Records:
    more = [(f"archive/data/{key}", data) for key, data in storages.items()]
    return [("archive/data.pkl", pickle), ("archive/byteorder", b"little"), *more, ("archive/version", b"3\n")]


def changes(rng: Random) -> dict[str, Change]:
    """Lies of an archive, by name; each about one record or about the end."""
    chosen, seen = rng.randrange(4), itertools.count()

    def of_record(**new: Any) -> Change:
        return lambda part: replace(part, new) if "method" in part and next(seen) == chosen else None

    def of_end(**new: Any) -> Change:
        return lambda part: replace(part, new) if "count" in part else None

    def replace(part: dict[str, Any], new: dict[str, Any]) -> None:
        part |= {key: value(part) if callable(value) else value for key, value in new.items()}

    def zip64(count: int) -> Callable[[dict[str, Any]], bytes]:
        def locator(end: dict[str, Any]) -> bytes:
            at = end["offset"] + len(end["directory"])
            # The end of a zip64 archive and its locator, which both stand before the usual end.
            numbers = (44, 20, 20, 0, 0, end["count"] + count, end["count"] + count, end["size"], end["offset"])
            return b"PK\6\6" + struct.pack("<QHHIIQQQQ", *numbers) + b"PK\6\7" + struct.pack("<IQI", 0, at, 1)

        return locator

    def deflated(record: dict[str, Any]) -> int:
        record["data"] = zlib.compress(record["data"])[2:-4]
        return len(record["data"])

    far = rng.choice((2**31, 2**32 - 1, 100))
    larger = {key: (lambda r, key=key: r[key] + far) if far == 100 else far for key in ("size", "packed")}
    extra = {"extra": b"\1\0\x10\0" + struct.pack("<QQ", 2**40, 2**40), "size": 2**32 - 1, "packed": 2**32 - 1}
    return {
        "none": lambda _: None,
        "in capitals": of_record(name=lambda r: r["name"].upper(), header_name=lambda r: r["name"].upper()),
        "of another name in the header": of_record(header_name=lambda r: r["name"][::-1]),
        "of another folder": of_record(name=lambda r: b"x" + r["name"][1:], header_name=lambda r: b"x" + r["name"][1:]),
        "compressed": of_record(packed=deflated, method=8, header_size=1),
        "said to be compressed": of_record(method=rng.choice((8, 12, 99))),
        "larger in the directory": of_record(**larger),
        "unpacked larger": of_record(size=far),
        "of another size in the header": of_record(header_size=far),
        "elsewhere": of_record(offset=rng.choice((0, 1, 2**31, 2**32 - 1))),
        "repeated": of_record(times=rng.choice((2, 200))),
        "encrypted": of_record(flags=1),
        "a folder": of_record(attributes=0x10),
        "with an extra": of_record(**extra),
        "without a header": of_record(header_magic=b"PK\0\0"),
        "with zip64": of_end(before=zip64(0)),
        "with another zip64": of_end(before=zip64(rng.choice((-1, 1, 2**40)))),
        "with a comment": of_end(comment=b"PK\5\6" + bytes(18)),
        "with a comment that is missing": of_end(missing=9),
        "after something": of_end(prefix=bytes(rng.randrange(1, 100))),
        "with another count": of_end(count=lambda end: max(0, end["count"] + rng.choice((-1, 1, 60_000)))),
        "with another place": of_end(offset=lambda end: end["offset"] + rng.choice((-46, 1, 2**31))),
        "with another size": of_end(size=lambda end: max(0, end["size"] + rng.choice((-46, 1, 2**31)))),
        "with two directories": of_end(directory=lambda end: end["directory"] * 2),
        "with a hidden directory": of_end(before=lambda end: end["directory"]),
    }


def saved(value: Any, zipped: bool = True) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def opened(content: bytes) -> Records:
    """The records of an archive by torch.save."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return [(record.filename, archive.read(record)) for record in archive.infolist()]


def legacy(pickle: bytes, storages: dict[str, bytes], rng: Random) -> bytes:
    """A file in the format from before torch 1.6."""
    keys, lie = list(storages), rng.choice(("none", "none", "none", "empty", "twice", "other", "numel", "cut"))
    keys = {"empty": [], "twice": keys * 2, "other": [*keys, "9"]}.get(lie, keys)
    # Magic number, protocol and system, then the pickle, the keys of its storages, and the bytes of each.
    head = saved(1, zipped=False)
    content = head[: head.rindex(b"\x80\x02K\x01.")] + pickle + b"\x80\x02](" + b"".join(map(text, keys)) + b"e."
    for key in keys:
        data = storages.get(key, b"")
        content += struct.pack("<q", len(data) // 4 if lie != "numel" else rng.choice((-1, 2**61, 10**9))) + data
    return content[: rng.randrange(len(content))] if lie == "cut" else content


def made(seed: int, index: int) -> Case:
    """The case of this number."""
    # Drawn from its number alone, so that --only makes the same case again.
    rng = Random(f"{seed} {index}")
    zipped, kind = rng.random() < 0.7, rng.choice(("written", "changed", "changed", "program", "program", "program"))
    if kind == "program":
        storages = {"0": bytes(range(16)), "1": bytes(4096), "2": b""}
        program = Program(rng, {key: len(data) for key, data in storages.items()}, b"" if zipped else b"N")
        pickle = program.written()
        storages = storages if zipped else {key: storages.get(key, b"") for key in program.used}
        lies = changes(rng)
        lie = rng.choice(list(lies)) if zipped and rng.random() < 0.1 else "none"
        content = archive(records_of(pickle, storages), lies[lie]) if zipped else legacy(pickle, storages, rng)
        return Case(f"program in {'an archive' if zipped else 'the old format'}, {lie}", content, is_program=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = random_state(rng)
        content = saved(state, zipped)
    state = {key: x for key, x in state.items() if key != "digests"}
    if kind == "written":
        return Case(f"written in {'an archive' if zipped else 'the old format'}", content, state)
    if not zipped:
        return Case("cut short in the old format", content[: rng.randrange(len(content))], state)
    if rng.random() < 0.3:
        bit = rng.randrange(8 * len(content))
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        return Case("an archive with another bit", bytes(flipped), state)
    lies = changes(rng)
    lie = rng.choice(list(lies))
    return Case(f"an archive {lie}", archive(opened(content), lies[lie]), state)


# Checks.


def equal(a: Any, b: Any) -> bool:
    """True if two values are the same, to the types, shapes and bytes of their tensors."""
    if isinstance(a, np.generic):
        return bool(a.item() == b)
    if isinstance(a, torch.Tensor):
        same = isinstance(b, torch.Tensor) and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        return same and a.requires_grad == b.requires_grad and repr(a.tolist()) == repr(b.tolist())
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, Namespace):
        return equal(vars(a), vars(b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, np.ndarray):  # NumPy unpickles it in the machine's byte order
        return a.dtype.newbyteorder("=") == b.dtype and a.shape == b.shape and bool((a == b).all())
    return bool(a == b)


def loaded(path: Path, mapped: bool = False) -> Any:
    """The value of a file, compared with its CRCs and its digest."""
    with path.open("rb") as file:
        state = load(file, mapped)
        check_loaded(file, path, state)
    return state


READERS: dict[str, Callable[[Path], Any]] = {
    "load": loaded,
    "load mapped": functools.partial(loaded, mapped=True),
    "describe": describe,
    "why_damaged": why_damaged,
    "num_updates": num_updates,
}


def faults_of(case: Case, path: Path) -> Iterator[str]:
    """Faults in the way that each reader reads a file: its value, time, memory and message."""
    path.write_bytes(case.content)
    allowed = MULTIPLE * len(case.content) + MORE
    for reader, read in READERS.items():
        value, refused, before, began = None, None, _reset_peak(), time.process_time()
        try:
            value = read(path)
        except (CheckpointError, FileError) as error:
            refused = str(error)
        except Exception as error:
            yield f"{reader}: {type(error).__name__} {str(error)[:200]}"
            continue
        took, peak = time.process_time() - began, _peak() - before
        beyond = (peak - MULTIPLE * len(case.content)) / 2**20
        MOST.update(seconds=max(took, MOST["seconds"]), mib=max(beyond, MOST["mib"]))
        if took > SECONDS or peak > allowed:
            yield f"{reader}: {took:.1f} s, {peak / 2**20:.0f} MiB for {len(case.content):,} bytes"
        said = refused or (str(value) if reader in ("describe", "why_damaged") else "")
        if "\n" in said or len(said) > 1500 or not said.isprintable():
            yield f"{reader}: says {said[:300]!r}"
        if refused or not reader.startswith("load"):
            if refused and case.kind.startswith("written"):
                yield f"{reader}: refused, {refused}"
            continue
        expected = case.value
        if case.is_program:
            expected = _as_torch_loads(path)
            if isinstance(expected, Exception) and re.search("GLOBAL (numpy|fairseq)", str(expected)):
                continue  # torch knows none of these
        if not equal(expected, value):
            yield f"{reader}: loaded {str(value)[:200]}"


def _as_torch_loads(path: Path) -> Any:
    torch.serialization.add_safe_globals([Namespace])  # `safe_globals` would disallow it in the process afterwards
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            return error


def _reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description="Loads random checkpoints, valid ones and attacks.")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one case, which is described")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30,) * 2)  # a larger allocation fails, and the machine goes on
    signal.signal(signal.SIGALRM, _give_up)
    torch.set_num_threads(1)
    found, kinds, accepted = 0, Counter[str](), Counter[str]()
    numbers = range(arguments.count) if arguments.only is None else [arguments.only]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        for index in numbers:
            case = made(arguments.seed, index)
            signal.alarm(HUNG)
            faults = list(faults_of(case, path))
            signal.alarm(0)
            found += bool(faults)
            kinds[case.kind] += 1
            accepted[case.kind] += describe(path)[0]
            for fault in faults:
                print(f"{index} ({case.kind}): {fault}", flush=True)
            if arguments.only is not None:
                print(case.kind, describe(path), case.content[:3000], sep="\n")
    for kind, count in sorted(kinds.items()):
        print(f"{count:6,} {kind}: {accepted[kind]:,} loaded, the others refused")
    print(f"{sum(kinds.values()):,} files, {sum(accepted.values()):,} loaded, {found} faults")
    print(f"At most {MOST['seconds']:.2f} s, and {MOST['mib']:.0f} MiB beyond {MULTIPLE} times a file's size")
    return bool(found)


def _give_up(*_: object) -> None:
    raise TimeoutError(f"more than {HUNG} s")


if __name__ == "__main__":
    sys.exit(main())
