"""Text is read as UTF-8 without a byte order mark; other bytes are named."""

import codecs
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fairseq_fastweights.files.text_files import FileError, decode, open_text, read_text, text_of

MARK = codecs.BOM_UTF8
LONG = b"a\n" * 32767  # as much as is read at once, but for two bytes


@pytest.mark.parametrize("content", ["", "a b\nc\n", "a", "日本\r\nb\rc", " \x85\u2028\n\ufeff"])
def test_texts_are_as_python_reads_them_without_the_mark(tmp_path: Path, content: str) -> None:
    path = tmp_path / "text"
    for newline in ("\n", None):
        path.write_bytes(content.encode())
        with path.open(encoding="utf-8", newline=newline) as file:
            expected = file.readlines()
        for mark in (b"", MARK):
            path.write_bytes(mark + content.encode())
            with open_text(path, newline) as file:
                assert list(file) == expected
    assert read_text(path) == "".join(expected)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a b\n\xff\xfe c\n", "line 2: not UTF-8, byte 1 of the line is 0xff (byte 5 of the file)"),
        (MARK + b"\xe4", "line 1: not UTF-8, byte 4 of the line is 0xe4 (byte 4 of the file)"),
        (b"a\nb\xe2\x82", "line 2: not UTF-8, byte 2 of the line is 0xe2 (byte 4 of the file)"),  # it ends too soon
        (LONG + b"x\xe2\x82z", "line 32768: not UTF-8, byte 2 of the line is 0xe2 (byte 65536 of the file)"),
        (LONG + LONG + b"x\n\x80", "line 65536: not UTF-8, byte 1 of the line is 0x80 (byte 131071 of the file)"),
    ],
)
def test_other_bytes_are_named_with_their_line_and_place(tmp_path: Path, content: bytes, says: str) -> None:
    path, pipe = tmp_path / "text", tmp_path / "pipe"
    path.write_bytes(content)
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(content))  # which cannot be read once more
    writer.start()
    ways: dict[str, Callable[[], object]] = {
        str(path): lambda: read_text(path),
        str(pipe): lambda: list(open_text(pipe)),
        "standard input": lambda: text_of(io.TextIOWrapper(io.BytesIO(content), "latin-1")).read(),
    }
    for name, read in ways.items():
        with pytest.raises(FileError) as error:
            read()
        assert str(error.value) == f"{name}, {says}"
    writer.join()
    with pytest.raises(FileError) as error:
        decode(content[-4:], str(path))
    assert str(error.value) == f"{path}, {says}"


def test_lines_are_decoded_and_standard_input_stays_open(tmp_path: Path) -> None:
    assert decode("größer\n".encode(), tmp_path / "nothing") == "größer\n"
    (tmp_path / "text").write_bytes(b"a\n")
    with pytest.raises(FileError, match="text has changed while it was read"):
        decode(b"\xff\n", tmp_path / "text")
    with (tmp_path / "text").open("rb") as file:
        with text_of(io.TextIOWrapper(file)) as text:
            assert list(text) == ["a\n"]
        assert not file.closed
    without_bytes = io.StringIO("a")
    assert text_of(without_bytes) is without_bytes


def test_a_data_workers_traceback_is_left_out() -> None:
    from torch._utils import ExceptionWrapper

    try:
        raise FileError("text has changed: it had 4 bytes")
    except FileError:
        sent = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(FileError) as error:
        sent.reraise()
    assert str(error.value) == "text has changed: it had 4 bytes"
