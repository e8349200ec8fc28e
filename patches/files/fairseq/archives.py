"""Unpacks archives, of which nothing may be written outside of the folder that they are unpacked into."""

import hashlib
import lzma
import os
import stat
import tarfile
import tempfile
import zlib

from fairseq.text_files import FileError


def unpack(archive: str, cache: str) -> str:
    """Unpacks a model's archive into a folder of `cache`, whole or not at all, and returns that folder.

    It is unpacked once: its path, size and date make the folder's name. A folder at its top that holds all the rest is
    left out, as fairseq does.

    Raises:
        FileError: if it is no whole archive, or holds something else than files and folders; the message names it.
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

    Releases of Python before 3.10.12 and 3.11.4 lack tarfile's own filter, and that of later ones lets links lead out
    (CVE-2025-4517). So there may be no links; names are looked at before anything is written.

    Raises:
        FileError: if it is no whole archive, or holds something else than files and folders; the message names it.
    """
    try:
        with tarfile.open(archive, "r:*") as opened:
            names = [_checked(member) for member in opened.getmembers()]
            if hasattr(tarfile, "data_filter"):
                opened.extractall(folder, filter="data")
            else:
                opened.extractall(folder)
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
        raise FileError(f"{archive} cannot be unpacked: {str(error) or type(error).__name__}") from None
    return os.path.commonpath(names) if names else ""


def _checked(member: tarfile.TarInfo) -> str:
    """The path of what an archive holds. Raises `ValueError` if it is no file or folder in the archive's own."""
    path = os.path.normpath(member.name)
    if not (member.isfile() or member.isdir()):
        raise ValueError(f"{member.name!r} is no file or folder; it must be one")
    if os.path.isabs(path) or path.split(os.sep)[0] == os.pardir:
        raise ValueError(f"{member.name!r} would be written outside of its folder")
    return path
