"""Fetches models by name from the Hugging Face hub or its cache."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_fastweights.conversion.files.folders import CONFIG_FILES, is_template
from fairseq_fastweights.conversion.files.weight_files import WEIGHTS, first_line
from fairseq_fastweights.invalid_input import InvalidInput

# An owner and a name, or a name alone, as the hub allows them.
_NAME = re.compile(r"[a-z0-9][\w.-]*(/[a-z0-9][\w.-]*)?", re.ASCII | re.IGNORECASE)
_MUST = "SOURCE must be a folder, a GGUF file, or a model's name on the hub"


@dataclass(frozen=True)
class Files:
    """The files of a model that a conversion needs.

    Attributes:
        name: of the model.
        revision: the commit, so that the files that are fetched are those that were listed.
        sizes: of each file, in bytes; None if the hub does not give it.
        cached: names of the files that are in the cache already.
    """

    name: str
    revision: str
    sizes: dict[str, int | None]
    cached: frozenset[str]

    def __str__(self) -> str:
        rows = [
            f"{_readable(size):>10}  {file}{'  (in the cache)' if file in self.cached else ''}"
            for file, size in self.sizes.items()
        ]
        left = sum(size or 0 for file, size in self.sizes.items() if file not in self.cached)
        return "\n".join([f"{self.name} at {self.revision}:", *rows, f"to be fetched: {_readable(left)}"])


def is_name(source: str) -> bool:
    """True if a model on the hub can have this name."""
    return _NAME.fullmatch(source) is not None


def list_files(name: str, revision: str | None) -> Files:
    """Lists the files of a model on the hub: its configuration, its tokenizer and one form of its weights."""
    hub = _hub()
    try:
        info = hub.HfApi().model_info(name, revision=revision, files_metadata=True)
    except Exception as error:
        raise _explained(name, revision, error) from None
    sizes = {file.rfilename: file.size for file in info.siblings or []}
    beside = [*CONFIG_FILES, *sorted(filter(is_template, sizes))]
    chosen = [file for file in beside if file in sizes] + _weights(sizes)
    paths = {file: hub.try_to_load_from_cache(name, file, revision=info.sha) for file in chosen}
    cached = frozenset(file for file, path in paths.items() if isinstance(path, str))
    return Files(name, info.sha, {file: sizes[file] for file in chosen}, cached)


def fetch(name: str, revision: str | None) -> Path:
    """Returns a folder with a model's files, fetched or from the cache; without a network, from the cache alone."""
    hub = _hub()
    # Listed first: the branch may move between the listing and the download.
    try:
        files = list_files(name, revision)
    except NoNetwork as error:
        try:
            return Path(hub.snapshot_download(name, revision=revision, local_files_only=True))
        except Exception:
            cache = hub.constants.HF_HUB_CACHE
            raise InvalidInput(f"{error}; nor is it in the cache, {cache}") from None
    try:
        return Path(hub.snapshot_download(name, revision=files.revision, allow_patterns=list(files.sizes)))
    except Exception as error:
        raise _explained(name, revision, error) from None


class NoNetwork(InvalidInput):
    """The hub cannot be reached."""


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise InvalidInput(
            "fetching a model by its name needs the package huggingface_hub: pip install huggingface_hub"
        ) from None
    return huggingface_hub


def _weights(sizes: dict[str, int | None]) -> list[str]:
    """Chooses the files of weights: of several forms, the one that `WeightFiles` would read."""
    found = next((name for name in WEIGHTS if name in sizes), None)
    if found is None or not found.endswith(".index.json"):
        return [found] if found else []
    start, _, end = found.removesuffix(".index.json").rpartition(".")
    # Some have the ending twice, as model.safetensors-00001-of-00002.safetensors.
    shard = re.compile(rf"{re.escape(start)}(\.{re.escape(end)})?-\d+-of-\d+\.{re.escape(end)}")
    return [found, *sorted(name for name in sizes if shard.fullmatch(name))]


def _explained(name: str, revision: str | None, error: Exception) -> InvalidInput:
    """Explains an error in one line."""
    errors, line = _hub().errors, first_line(error).rstrip(".")
    if isinstance(error, errors.GatedRepoError):
        page = f"https://huggingface.co/{name}"
        return InvalidInput(f"{name}: its conditions must be accepted first, at {page}; then log in: hf auth login")
    if isinstance(error, errors.RevisionNotFoundError):
        return InvalidInput(f"{name}: revision is {revision!r}; the hub has no such branch, tag or commit of it")
    if isinstance(error, errors.RepositoryNotFoundError):
        return InvalidInput(
            f"{name}: {_MUST}; there is no such folder, and the hub has no such model, or none that everyone may read "
            "(hf auth login)"
        )
    if isinstance(error, errors.HFValidationError):
        return InvalidInput(f"{name}: {_MUST}; {line}")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return InvalidInput(f"{name}: the hub answered {status} ({line})")
    return NoNetwork(f"{name}: {_MUST}; there is no such folder, and the hub cannot be reached ({line})")


def _readable(size: int | None) -> str:
    if size is None:
        return "?"
    value, units = float(size), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"
