"""Unpacks archives, of which nothing may be written outside of the folder that they are unpacked into."""

import hashlib
import lzma
import os
import stat
import tarfile
import tempfile
import zlib

from fairseq.text_files import FileError

_TIMES = 100
"""Files may become so many times as large as their archive. Weights become a little larger, texts five times."""


def unpack(archive: str, cache: str) -> str:
    """Unpacks a model's archive into a folder of `cache`, whole or not at all, and returns that folder.

    It is unpacked once: its path, size and date make the folder's name. A folder at its top that holds all the rest is
    left out, as fairseq does.

    Raises:
        FileError: if it is no whole archive, holds something else than files and folders, or becomes too large; the
            message names it.
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
        try:
            top = os.path.join(inside, _extract(archive, inside, _TIMES * found.st_size))
        except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, ValueError, OSError) as error:
            raise FileError(f"{archive} cannot be unpacked: {str(error) or type(error).__name__}") from None
        try:
            # In one step, so that no other process sees a part.
            os.rename(top if os.path.isdir(top) else os.path.dirname(top), folder)
        except OSError:
            if not os.path.isdir(folder):  # by another process, in the meantime
                raise
    return folder


def _extract(archive: str, folder: str, most: int) -> str:
    """Unpacks files of at most so many bytes into `folder`; returns the path that all their names have in common."""
    names = []
    with tarfile.open(archive, tarinfo=_Member) as opened:
        for member in opened:
            # No links: the filter lets some lead out in releases of Python before 3.11.13 and 3.12.11 (CVE-2025-4517).
            if not (member.isfile() or member.isdir()) or member.issparse():
                raise ValueError(f"{member.name[:200]!r} is no file or folder; it must be one, and not sparse")
            most -= member.size
            if member.size < 0 or most < 0:
                raise ValueError(f"it would become more than {_TIMES} times as large")
            member = tarfile.data_filter(member, folder)
            member = member.replace(mode=None, deep=False)  # type: ignore[arg-type]  # permissions by the umask
            if (name := os.path.normpath(member.name)) in names and member.isfile():
                raise ValueError(f"{name[:200]!r} is there twice")
            names.append(name)
            opened.extract(member, folder, filter="data")
    if not any(os.path.isfile(os.path.join(folder, name)) for name in names):
        raise ValueError("it holds no file")
    return os.path.commonpath(names)


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
