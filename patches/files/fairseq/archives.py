"""Unpacks archives, of which nothing may be written outside of the folder that they are unpacked into."""

import bz2
import gzip
import hashlib
import lzma
import os
import shutil
import stat
import tarfile
import tempfile
import zlib
from typing import Any, BinaryIO

from fairseq.text_files import FileError

_TIMES = 100
"""So many times its size may become of an archive. Weights become a little larger, texts five times."""
_HEADERS = 2**16
"""Bytes of names and padding, more than that."""
_MOST, _LONGEST = 10_000, 255
"""Files and folders, and bytes of a name with its folders."""


def unpack(archive: str, cache: str) -> str:
    """Unpacks a model's archive into a folder of `cache`, whole or not at all, and returns that folder.

    It is unpacked once: its path, size and date make the folder's name. A folder at its top that holds all the rest is
    left out, as fairseq does.

    Raises:
        FileError: as `extract`.
    """
    found = os.stat(archive)
    if not stat.S_ISREG(found.st_mode):
        raise FileError(f"{archive} is no regular file; it must be a folder or an archive by tar")
    identity = f"{os.path.realpath(archive)} {found.st_size} {found.st_mtime_ns}"
    folder = os.path.join(cache, f"unpacked-{hashlib.sha256(identity.encode()).hexdigest()}")
    if os.path.isdir(folder):
        return folder
    os.makedirs(cache, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unpacking-", dir=cache) as work:
        inside = os.path.join(work, "archive")
        top = os.path.join(inside, extract(archive, inside))
        try:
            os.rename(top if os.path.isdir(top) else os.path.dirname(top), folder)
        except OSError:
            if not os.path.isdir(folder):  # by another process, in the meantime
                raise
    return folder


def extract(archive: str, folder: str) -> str:
    """Unpacks an archive into `folder`, and returns the path that all its names have in common.

    tarfile's own filter is missing from releases of Python before 3.10.12 and 3.11.4, lets links lead out in later ones
    (CVE-2025-4517), and bounds nothing. So each name and size is looked at before its file is written, and no links,
    permissions or owners are taken.

    Raises:
        FileError: if it is no whole archive, holds something else than files and folders, or becomes too large; the
            message names it.
    """
    most = _TIMES * os.path.getsize(archive)
    paths: dict[str, bool] = {}  # and whether it is a folder
    try:
        with open(archive, "rb") as file:
            stream: Any = _Stream(file, most + _HEADERS)
            with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as opened:
                for member in opened:
                    path = _checked(member, paths)
                    most -= member.size
                    if most < 0:
                        raise ValueError(f"it would become more than {_TIMES} times as large")
                    _write(opened, member, os.path.join(folder, path))
            while stream.read(2**20):  # the rest, whose checksum may be wrong
                pass
        if all(paths.values()):
            raise ValueError("it holds no file")
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, ValueError, MemoryError) as error:
        raise FileError(f"{archive} cannot be unpacked: {str(error) or type(error).__name__}") from None
    return os.path.commonpath(paths)


class _Stream:
    """The tar within an archive, of at most so many bytes."""

    def __init__(self, file: BinaryIO, most: int) -> None:
        begin = file.read(6)
        file.seek(0)
        kinds: dict[bytes, Any] = {
            b"\x1f\x8b": gzip.open,
            b"BZh": bz2.open,
            b"\xfd7zXZ\0": lzma.open,
            b"\x5d\0\0": lzma.open,
        }
        opened = next((kind for magic, kind in kinds.items() if begin.startswith(magic)), None)
        self._file: Any = opened(file) if opened else file
        self._left = most

    def read(self, size: int) -> bytes:
        try:
            content: bytes = self._file.read(size)
        except OSError as error:  # by gzip and bz2 for what is none
            raise ValueError(str(error)) if error.errno is None else error from None
        self._left -= len(content)
        if self._left < 0:
            raise ValueError(f"it would become more than {_TIMES} times as large")
        return content


class _Member(tarfile.TarInfo):
    """A member whose header must be whole: after the first one, tarfile takes any other for the end."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> "_Member":
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # the mark of the end
            raise
        except tarfile.HeaderError as error:
            raise ValueError(f"it is cut short, damaged or no archive ({error})") from None


def _checked(member: tarfile.TarInfo, paths: dict[str, bool]) -> str:
    """Adds the path of what an archive holds to `paths`, and returns it.

    Raises `ValueError` if it is no file or folder in the archive's own, or is another file as well.
    """
    name, path = repr(member.name[:200]), os.path.normpath(member.name)
    parts = path.split(os.sep)
    if not (member.isfile() or member.isdir()) or member.issparse():
        raise ValueError(f"{name} is no file or folder; it must be one, and not sparse")
    if os.path.isabs(path) or parts[0] == os.pardir:
        raise ValueError(f"{name} would be written outside of its folder")
    if len(os.fsencode(path)) > _LONGEST:
        raise ValueError(f"{name} has more than {_LONGEST} bytes")
    above = [os.sep.join(parts[:count]) for count in range(1, len(parts))]
    is_folder = paths.get(path, path == os.curdir or member.isdir())
    if not all(paths.get(folder, True) for folder in above) or is_folder != member.isdir():
        raise ValueError(f"{name} would need a file to be a folder, too")
    if path in paths and not member.isdir():
        raise ValueError(f"{name} is there twice")
    paths.update(dict.fromkeys(above, True))
    paths[path] = member.isdir()
    if len(paths) > _MOST:
        raise ValueError(f"it holds more than {_MOST:,} files and folders")
    return path


def _write(opened: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    if member.isdir():
        os.makedirs(path, exist_ok=True)
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    content = opened.extractfile(member)
    assert content is not None
    with content, open(path, "xb") as file:
        shutil.copyfileobj(content, file)
