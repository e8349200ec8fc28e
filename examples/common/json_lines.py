"""Files of JSON lines that grow, and of which a crash leaves whole lines."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.files import open_to_append


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Appends a line, which is on the disk when this returns. A half line that a crash left is removed first. Raises
    OSError if it cannot be written, or the file is a link.
    """
    line = (json.dumps(value) + "\n").encode()
    with open_to_append(path) as file:
        with suppress(OSError):  # a file system without such locks
            fcntl.lockf(file, fcntl.LOCK_EX)  # what another process is writing is no half line
        file.seek(0)
        text = file.read()
        if text[-1:] not in (b"", b"\n"):  # else, without locks, what others wrote since would be cut off
            file.truncate(text.rfind(b"\n") + 1)
        if file.write(line) != len(line):
            raise OSError(f"{path} could not be written whole: is the disk full?")
        os.fsync(file.fileno())


def whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file without their ends, and without a half line at the end; none if there is no file."""
    if path.exists():
        yield from path.read_bytes().split(b"\n")[:-1]
