"""The ledger: a file of JSON lines, one line for each row and seed that was trained and scored."""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from common.commands import ROOT, fast_products, shown
from common.files import append_line, read_values
from common.identity import digest_of, split_files

from papers.rows import PACKAGE, Places, plugin

COMMITTED = Path(__file__).with_name("ledger.jsonl")
"""The runs that the tables of docs/results.md and docs/convert.md are made of."""
_NO_LEDGER = ("--", ":(exclude)examples/papers/ledger.jsonl")
"""All files but that one, which a run itself changes."""
_COMPUTES = ("fairseq_fastweights", "cpu")
"""The folders whose code makes a run's numbers."""


@dataclass(frozen=True)
class Entry:
    """A row that was trained and scored with a seed.

    Fields after `scores` are empty or None in lines that were written before they were noted. Speed and memory are not
    compared: they differ from one run to the next.
    """

    table: str
    row: str
    seed: int
    commands: list[str]  # those that ran, with DATA, OUT and SOURCE for the folders
    commit: str  # of this repository; "" outside a checkout, as is the next
    code: str  # a digest of the code that computes
    versions: dict[str, str]  # of Python and of the packages that compute
    processor: str  # as the system calls it, and whether MKL was told to use AVX-512 on it (`fast_products`)
    data: str  # a digest of the dictionary and the binarised training text
    seconds: float  # of the training
    parameters: int
    scores: dict[str, float]
    inputs: str = ""  # a digest of the text that is scored and of the model that the training started from
    gpu: str = ""  # the name of those that trained; "" on a CPU
    gpus: int = 0
    precision: str = ""
    words_per_second: float | None = field(default=None, compare=False)  # the median of the training's reports
    memory_gib: float | None = field(default=None, compare=False)  # peak of the first GPU, or of the largest process
    kernels: dict[str, str] = field(default_factory=dict)  # by part a digest of the sources of compiled kernels
    backends: list[str] = field(default_factory=list)  # those that computed the update rules, by the training's log
    without_kernels: list[str] = field(default_factory=list)  # those of them that ran because kernels were missing
    valid: list[tuple[int, float]] = field(default_factory=list)  # perplexity by update
    train: list[tuple[int, float]] = field(default_factory=list)  # the same of training text, at most 100 of them

    @property
    def key(self) -> tuple[str, str, int, tuple[str, ...]]:
        """The key that tells it from others."""
        return self.table, self.row, self.seed, tuple(self.commands)

    @property
    def name(self) -> str:
        return f"{self.table} {self.row}, seed {self.seed}"


def read_ledger(path: Path) -> list[Entry]:
    """All entries; none if there is no such file. Raises UserError for a line that is none."""
    return [entry for _, entry in read_values(path, _read, "entry of a ledger")]


def _read(value: Any) -> Entry:
    curves = {name: [(update, perplexity) for update, perplexity in value[name]] for name in ("train", "valid")}
    return Entry(**value | curves)


def append_entry(path: Path, entry: Entry) -> None:
    append_line(path, asdict(entry))


def command_lines(commands: Iterable[Sequence[str]], places: Places) -> list[str]:
    """Commands without the parts that differ from one machine to the next."""
    folders = [
        (places.out, "OUT"),
        (places.data, "DATA"),
        (places.checkpoint, "SOURCE"),
        (shown(plugin()), PACKAGE.name),
    ]
    # One may lie in another.
    inner_first = sorted(((str(path), name) for path, name in folders if path), key=lambda pair: -len(pair[0]))
    return [shlex.join(_words(words, dict(inner_first))) for words in commands]


def _words(command: Sequence[str], names: dict[str, str]) -> Iterator[str]:
    program, *words = command
    yield Path(program).name
    for word in words:
        for folder, name in names.items():
            if word == folder or word.startswith(f"{folder}/"):
                word = name + word[len(folder) :]
                break
        yield word


def circumstances(data: Path) -> dict[str, Any]:
    """The code, the machine and the data, as an entry states them."""
    return {
        "commit": _git("rev-parse", "--short=12", "HEAD")
        + "-dirty" * bool(_git("diff", "--name-only", "HEAD", *_NO_LEDGER)),
        "code": code_digest(),
        "versions": {"python": platform.python_version()} | dict(_versions()),
        "processor": _processor(),
        "kernels": _kernels(),
        "data": data_digest(data),
    }


def code_digest() -> str:
    """A digest of the files that compute, as they are committed."""
    return "-".join(_git("rev-parse", "--short=12", f"HEAD:{folder}") for folder in _COMPUTES).strip("-")


def data_digest(data: Path) -> str:
    """A digest of a folder's dictionaries and binarised training text."""
    digest = hashlib.sha256()
    # fairseq numbers words by the dictionary: text and dictionary together are the data.
    for path in sorted([*data.glob("dict*.txt"), *data.glob("train*.bin")]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def inputs_digest(data: Path, source: Path | None, *splits: str) -> str:
    """A digest of splits of a folder's text, and of the checkpoint that a training starts from."""
    files = {path for split in splits for path in split_files(data, split)}
    return digest_of(files | ({source} if source is not None and source.is_file() else set()))


def precision(words: Sequence[str]) -> str:
    """That of the training with this command."""
    for name, options in (
        ("float16", ("--fp16", "--memory-efficient-fp16")),
        ("bfloat16", ("--bf16", "--memory-efficient-bf16")),
        ("float16 by autocast", ("--amp",)),
    ):
        if any(option in words for option in options):
            return name
    return "float32"


def _kernels() -> dict[str, str]:
    """The compiled kernels of the package that trains, by part: the first digits of the digest of their sources."""
    try:
        record = json.loads((plugin() / "_native_build.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {part: made["sources"][:12] for part, made in record.items() if made.get("state") == "built"}


def _versions() -> Iterator[tuple[str, str]]:
    for name in ("torch", "fairseq", "fairseq-fastweights", "numpy", "sacrebleu"):
        with suppress(PackageNotFoundError):
            yield name, version(name)


def _processor() -> str:
    return f"{_model_name()}, AVX-512 in MKL" if fast_products() else _model_name()


def _model_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _git(*words: str) -> str:
    """The output of a git command about this repository; "" if git fails."""
    try:
        found = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""
