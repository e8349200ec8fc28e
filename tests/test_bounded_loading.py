"""A file of torch.save is loaded within a small multiple of its size, or refused by name before it is loaded."""

import collections
import io
import re
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_fastweights import integrity
from fairseq_fastweights.bounded_loading import TooLargeError, load
from fairseq_fastweights.conversion.files.weight_files import load_safely
from fairseq_fastweights.digests import with_digests


class Call:
    """Unpickled, it is what a function returns."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


def saved(content: Any, zipped: bool = True) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


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


def missing_numbers() -> bytes:
    """A file in the format of before torch 1.6, whose list of the storages that follow is emptied."""
    content = saved({"model": {"w": torch.zeros(4)}}, zipped=False)
    start = content.rindex(b"\x80\x02]q\x00")
    return content[:start].replace(b"K\x04", b"J" + struct.pack("<i", 10**8)) + b"\x80\x02]."


def changed_archive(change: Callable[[zipfile.ZipFile, zipfile.ZipInfo, bytes], None]) -> bytes:
    """An archive of torch.save, each record of which `change` writes."""
    file = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved({"model": {"w": torch.zeros(10**4)}}))) as old,
        zipfile.ZipFile(file, "w") as new,
    ):
        for record in old.infolist():
            change(new, record, old.read(record))
    return file.getvalue()


def compress(archive: zipfile.ZipFile, record: zipfile.ZipInfo, content: bytes) -> None:
    archive.writestr(record.filename, content, zipfile.ZIP_DEFLATED)


def overlapped() -> bytes:
    """An archive whose directory has one record many times."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x/data.pkl", saved([1]))
        archive.writestr("x/data/0", bytes(10**5))
        archive.filelist += [archive.filelist[-1]] * 9
        archive._didModify = True  # type: ignore[attr-defined]
    return file.getvalue()


def very_deep() -> bytes:
    """Deeper than Python's own pickling goes."""
    return changed_archive(
        lambda archive, record, content: archive.writestr(
            record.filename,
            b"\x80\x02" + b"]" * 10**5 + b"a" * (10**5 - 1) + b"." if "data.pkl" in record.filename else content,
        )
    )


CRAFTED: dict[str, tuple[Callable[[], Any], str]] = {
    "compressed": (
        lambda: changed_archive(compress),
        "is damaged: its record .* is compressed, which torch.save never does",
    ),
    "overlapped": (overlapped, r"is damaged: its records have 1,00\d,\d+ bytes together; the file has 10\d,"),
    "numbers that are missing": (
        missing_numbers,
        r"is refused: model.w has shape \(100000000,\), 400,000,000 bytes; the file has",
    ),
    "bytes": (lambda: Call(bytearray, 10**8), "is refused: it asks for .*bytearray, which no checkpoint needs"),
    "a string": (lambda: ["x" * 10**5] * 99, r"is refused: its strings have 9,8\d\d,\d+ characters where they are"),
    "a list within itself": (lambda: {"cfg": itself()}, "is refused: cfg.1.again holds itself"),
    "lists of one list": (
        lambda: {"cfg": multiplied(9)},
        r"is refused: of its \d+ values there are [\d,]+ where they are repeated",
    ),
    "deep": (lambda: {"cfg": nested(101)}, r"is refused: cfg[.0]+ is nested more than 100 levels deep"),
    "very deep": (very_deep, r"is refused: 0(\.0)+ is nested more than 100 levels deep"),
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
        r"is refused: w has shape \(1000000000000,\), and no numbers",
    ),
    "sparse": (
        lambda: {"w": torch.eye(2).to_sparse()},
        "is refused: w is sparse or nested; it must be a plain tensor",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", CRAFTED)
def test_what_asks_for_more_than_the_file_holds_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    path, (make, says) = tmp_path / "model.pt", CRAFTED[kind]
    content = make()
    for zipped in (True, False) if not isinstance(content, bytes) else (True,):
        path.write_bytes(content if isinstance(content, bytes) else saved(content, zipped))
        tracemalloc.start()
        with path.open("rb") as file, pytest.raises(TooLargeError, match=f"^{says}"):
            load(file)
        assert tracemalloc.get_traced_memory()[1] < 60 * path.stat().st_size + 10**7
        tracemalloc.stop()
        with pytest.raises(ValueError, match=rf"^{re.escape(str(path))} {says}") as error:
            load_safely(path)
        assert "\n" not in str(error.value)
        whole, told = integrity.describe(path)
        assert not whole and re.match(rf"{re.escape(str(path))} {says}", told)


def test_what_repeats_a_little_is_loaded(tmp_path: Path) -> None:
    path, shared = tmp_path / "model.pt", (0.9, 0.98)
    content = {
        "model": {"few": torch.zeros(1).expand(1000, 1000), "w": torch.arange(4.0), "half": torch.zeros(2).half()},
        "groups": [{"betas": shared, "name": "x" * 1000} for _ in range(100)],
        "deep": nested(90),
        "order": collections.OrderedDict(a=multiplied(1)),
    }
    for zipped in (True, False):
        torch.save(with_digests(content), path, _use_new_zipfile_serialization=zipped)
        assert load_safely(path)["groups"] == content["groups"]
        assert integrity.why_damaged(path) is None
