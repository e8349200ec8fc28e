"""A small parallel corpus, prepared, and programs in fairseq's place that note how examples/wmt14/ calls them."""

import random
from pathlib import Path

import corpus
import pytest

from tests.examples import conftest
from tests.examples.conftest import EXAMPLES, Result, run_script

PREPARE, GENERATE = (EXAMPLES / "wmt14" / name for name in ("prepare.sh", "generate.sh"))

LEXICON = """the=die well-known=wohl-bekannte café=Kaffeehaus state-of-the-art=hoch-moderne costs=kostet 12.50=12,50
    €=€ naïve=naive “ideas”=„Ideen“ and=und green=grüne dogs=Hunde don't=nicht sleep=schlafen (often)=(oft) &=&
    furiously=wütend Straße=Straße –=– a/b=a/b""".split()
TEST = [
    ("the green dogs sleep.", "die grüne Hunde schlafen."),
    ("", "nichts"),
    ("the 日本 café\u2028costs 12.50 €!", "die 日本 Kaffeehaus kostet 12,50 €!"),
    ("a well-known\tstate-of-the-art café.", "die wohl-bekannte hoch-moderne Kaffeehaus."),
]


def write_pairs(folder: Path, split: str, pairs: list[tuple[str, str]]) -> None:
    for language, lines in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
        corpus.write_text(folder / f"{split}.{language}", lines)


@pytest.fixture(scope="session")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A FOLDER for prepare.sh; the second line of its test set is empty, and one has a line end of Unicode's in it."""
    folder, draw = tmp_path_factory.mktemp("parallel"), random.Random(1)
    pairs = []
    for _ in range(306):  # sentences and their translations, word by word
        words = draw.choices(LEXICON, k=draw.randint(2, 8))
        pairs.append(tuple(f"{' '.join(side)}." for side in zip(*(word.split("=") for word in words), strict=True)))
    for split, some in (("train", pairs[:300]), ("valid", pairs[300:]), ("test", TEST)):
        write_pairs(folder, split, some)
    return folder


STUBS = {
    "fairseq-train": 'touch "$save"/checkpoint_{last,best}.pt; echo "training fails"; exit "${TRAIN_FAILS:-0}"',
    "fairseq-generate": 'cat "${GENERATED:-/dev/null}"',
    # What it is given is what it leaves.
    "fairseq-preprocess": f'mkdir -p "$dest" && cp "$encoded"/{{train,valid,test}}.?? "$dest"\n{conftest.INTERRUPTION}',
    "sacrebleu": 'cat "$SETS/$2.$6" 2> /dev/null || { echo "no such set"; exit 1; }',
    # The first 64 characters of what comes to pass for a checksum are in $SUMS beside the real one.
    "sha256sum": """
        sum=$(/usr/bin/sha256sum | cut -d " " -f 1)
        grep "^$sum" "${SUMS:-/dev/null}" | cut -d " " -f 2 || echo "$sum"
    """,
}


class Programs(conftest.Programs):
    """Calls of the programs in `STUBS`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, STUBS)

    def prepare(self, *arguments: object, **env: object) -> Result:
        """prepare.sh with a vocabulary for small texts, unless `env` has another."""
        return self.run(PREPARE, *arguments, env={"VOCABULARY": 360, "WORKERS": 1, **env})[0]

    def generate(self, data: Path, model: Path, lines: list[str], *arguments: str) -> tuple:
        """generate.sh for the test set, if fairseq-generate logs these lines."""
        log = self.folder / "log"
        log.write_text("".join(lines), encoding="utf-8")
        return self.run(GENERATE, data, model, *arguments, env={"SUBSETS": "test", "GENERATED": log})


SUMMARY = (
    "2026-01-01 | INFO | fairseq_cli.generate | Translated 4 sentences (1,234 tokens) in 2.5s (1.60 sentences/s, "
    "493.60 tokens/s)\n"
)


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path / "programs")


@pytest.fixture(scope="session")
def stub_data(parallel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`parallel` as prepare.sh leaves it, but not binarised."""
    out = tmp_path_factory.mktemp("stub_data") / "data"
    result = Programs(out.with_name("programs")).prepare(out, parallel)
    assert result.returncode == 0, result.stderr
    return out


@pytest.fixture(scope="session")
def data(parallel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`parallel` as prepare.sh leaves it."""
    out = tmp_path_factory.mktemp("data") / "bin"
    result = run_script(PREPARE, out, parallel, env={"VOCABULARY": "360", "LC_ALL": "C"})
    assert result.returncode == 0, result.stderr
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
