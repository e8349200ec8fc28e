"""Creates a folder completely or not at all, and finds files in a folder that came from elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fairseq_fastweights.conversion.files.weight_files import check_regular, read_json
from fairseq_fastweights.invalid_input import InvalidInput

RECORD, ORIGINALS = "conversion.json", "huggingface"
"""Beside a converted model: a record for the conversion back, and the folder with the original files."""
FOR_FAIRSEQ = "fairseq"
"""In a Hugging Face folder: the subfolder with the files for the conversion back."""

TEMPLATE = "chat_template.jinja"
CONFIG_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    TEMPLATE,
)
"""The possible files of a model's settings and tokenizer, beside further chat templates."""
_TEMPLATES = "additional_chat_templates"


def path_of(name: str, given: object) -> Path:
    """The path that an argument of this name is, or a `ValueError` if it is none."""
    if not isinstance(given, (str, os.PathLike)):
        raise InvalidInput(f"{name} is a {type(given).__name__}; it must be the path of a file or a folder")
    return Path(given)


def check_target(target: Path) -> None:
    """Raises a `ValueError`, before any work, if `target` exists or its parent folder does not."""
    if os.path.lexists(target):
        raise InvalidInput(f"{target}: TARGET exists; nothing is overwritten, it must be a new folder")
    if not target.absolute().parent.is_dir():
        raise InvalidInput(f"{target}: TARGET's parent folder must exist")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A context with a new folder beside `target`, which is renamed to `target` at the end, or removed after an error.

    Raises:
        OSError: if something cannot be written; the message names `target`.
    """
    target = target.absolute()
    # Beside the target: a rename within a file system happens at once or not at all.
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        mask = os.umask(0)
        os.umask(mask)
        staging.chmod(0o777 & ~mask)  # mkdtemp's folders are their maker's alone
        yield staging
        check_target(target)  # os.rename would replace an empty folder that was made in the meantime
        staging.rename(target)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, OSError):
            raise OSError(f"{target}: TARGET cannot be written: {error}") from error
        raise


def file_in(folder: Path, name: str) -> Path | None:
    """Finds a file that is to be copied as it is, in a folder that may come from elsewhere; None if it is not there.

    A link there could bring any file of this machine into the folder that is then published. Links within the folder
    are followed, and those of the hub's cache, whose folders of a model hold links to its blobs.

    Args:
        folder: the folder.
        name: the file's path in it.
    """
    path = folder / name
    if not os.path.lexists(path):
        return None
    # The hub's cache: models--OWNER--NAME/snapshots/COMMIT/FILE is a link to models--OWNER--NAME/blobs/DIGEST.
    root, real = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    blobs = [root.parents[1] / "blobs"] if root.parent.name == "snapshots" else []
    if not any(real.is_relative_to(place) for place in (root, *blobs)):
        raise InvalidInput(
            f"{path} is a link to {real}; it must be a file in {folder}, so copy it there if it is yours"
        )
    check_regular(real, path)
    return real


def copy_files(files: dict[str, Path], target: Path) -> None:
    """Copies files to these names in a folder, which is made, and so are its subfolders."""
    target.mkdir(exist_ok=True)
    for name, path in files.items():
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target / name)


def is_template(name: str) -> bool:
    """True if this is the name, in its folder, of a chat template beside the first."""
    return re.fullmatch(rf"{_TEMPLATES}/\w[\w.-]*\.jinja", name, re.ASCII) is not None


def files_in(folder: Path, names: Iterable[str] = CONFIG_FILES, within: str = ".") -> dict[str, Path]:
    """The files of these names, and all further chat templates, in a subfolder of a folder, as `file_in` finds them."""
    beside = (f"{_TEMPLATES}/{file.name}" for file in (folder / within / _TEMPLATES).glob("*"))
    every = (*names, *sorted(filter(is_template, beside)))
    return {name: path for name in every if (path := file_in(folder, f"{within}/{name}"))}


def original_mixers(folder: Path) -> Any:
    """The mixers that a model had when `from_huggingface` made the folder, as `checkpoint_settings` writes them."""
    return read_json(folder / RECORD).get("mixers", "softmax")
