"""A tiny corpus, and fairseq's commands to run on it."""

from __future__ import annotations

import logging
import os
import random
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from copy import deepcopy
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import fairseq_patches
import pytest
import torch

torch.serialization.add_safe_globals([Namespace])  # in checkpoints of the translation model, which tests load
ROOT = Path(__file__).resolve().parents[1]
TASK = ["--user-dir", str(ROOT / "fairseq_fastweights"), "--task", "fast_weight_language_modeling"]
SMALL_MODEL = """--arch fast_weight_lm --decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32
    --decoder-output-dim 32 --decoder-ffn-embed-dim 32 --decoder-attention-heads 2 --share-decoder-input-output-embed
    --dropout 0""".split()
# On a GPU where the operations' tests run on one.
DEVICE = [] if os.environ.get("FASTWEIGHTS_TEST_DEVICE") == "cuda" else ["--cpu"]
QUIET = DEVICE + "--num-workers 0 --no-progress-bar --log-format json --log-interval 1".split()


def pytest_make_parametrize_id(val: object) -> str | None:
    """Names of dtypes, of rows of a table by their `name`, and of collections of these and plain values."""
    if isinstance(val, torch.dtype):
        return str(val).removeprefix("torch.")
    if isinstance(val, dict):
        names = [_name(x) for x in val.values()]
        return None if None in names else "x".join(f"{key}={name}" for key, name in zip(val, names, strict=True))
    if isinstance(val, (set, frozenset)):  # whose order differs from process to process
        val = sorted(val, key=str)
    if isinstance(val, (tuple, list)):
        names = [_name(x) for x in val]
        return None if None in names else "x".join(map(str, names))
    return val.name if is_dataclass(val) and isinstance(getattr(val, "name", None), str) else None


def _name(val: object) -> str | None:
    return str(val) if isinstance(val, (str, int, float, type(None))) else pytest_make_parametrize_id(val)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """The tensors here are tiny: on busy cores two threads wait for each other 40 times as long."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def our_fairseq() -> None:
    """Skips a test that another fairseq, or an older build of ours, cannot pass."""
    if metadata.version("fairseq") != fairseq_patches.VERSION:
        pytest.skip("needs the fairseq that tools/build_fairseq.py --force installs")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Binarised text of 40 word types, in train, valid and test; its topics last longer than the tests' segments."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    words = [f"w{i}" for i in range(40)]
    for split, topics in (("train", 30), ("valid", 5), ("test", 5)):
        rows = []
        for _ in range(topics):
            topic = draw.sample(words, 5)
            rows += [" ".join(draw.choices(topic, k=draw.randint(0, 14))) for _ in range(9)]
        (folder / f"{split}.txt").write_text("\n".join(rows) + "\n")
    return binarise(folder)


def age(folder: Path) -> None:
    """Makes the files a second older: a change now gets another time, however coarse the file system's clock is."""
    for path in folder.rglob("*"):
        earlier = path.stat().st_mtime_ns - 10**9
        os.utime(path, ns=(earlier, earlier))


def count_tokens(corpus: Path, split: str) -> int:
    """Words and line ends of a split of `corpus`."""
    text = (corpus.parent / f"{split}.txt").read_text()
    return len(text.split()) + text.count("\n")


def binarise(folder: Path, *flags: str) -> Path:
    """Runs fairseq-preprocess on folder/{train,valid,test}.txt and returns where its output is."""
    out = folder / "bin"
    splits = [(name, folder / f"{name}.txt") for name in ("train", "valid", "test")]
    prefixes = [word for name, path in splits if path.exists() for word in (f"--{name}pref", str(path))]
    command("preprocess", "--only-source", "--destdir", str(out), *prefixes, *flags)
    return out


def import_plugin() -> None:
    """Imports the plugin as --user-dir does, also where a test has imported a part of it before.

    fairseq as released takes a package that is there for one whose tasks and models are registered.
    """
    from fairseq.utils import import_user_module

    import_user_module(Namespace(user_dir=TASK[1]))
    for folder in ("tasks", "models"):
        for path in sorted((Path(TASK[1]) / folder).glob("*.py")):
            import_module(f"fairseq_fastweights.{folder}.{path.stem}".removesuffix(".__init__"))


@cache
def compose_once() -> None:
    """Lets hydra compose settings once for each choice of task, model ...: half of the time of a small training."""
    from fairseq.dataclass import utils

    compose, known = utils.compose, {}

    def composed(name: str, overrides: list[str], **more: Any) -> Any:
        key = (name, *overrides, *sorted(more.items()))
        if key not in known:
            known[key] = compose(name, overrides=overrides, **more)
        return deepcopy(known[key])

    utils.compose = composed


def command(name: str, *arguments: str, program: Callable[[], object] | None = None) -> str:
    """Runs `fairseq-<name>` within this process, which saves its start, and returns its log."""
    main = program or import_module(f"fairseq_cli.{name}").cli_main
    compose_once()
    # Of all trainings in a process fairseq would keep only one best checkpoint.
    vars(import_module("fairseq.checkpoint_utils").save_checkpoint).pop("best", None)
    if "fairseq_fastweights" in sys.modules:  # otherwise it is left to --user-dir
        import_plugin()
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Collector()
    root, before = logging.getLogger(), sys.argv
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    sys.argv = [f"fairseq-{name}", *arguments]
    try:
        main()
    finally:
        sys.argv = before
        root.setLevel(level)
        root.removeHandler(handler)
        # fairseq-preprocess leaves a handler that would log later calls in this one's folder.
        logging.getLogger("fairseq_cli.preprocess").handlers.clear()
    return "\n".join(lines)


def spawn(name: str, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs `fairseq-<name>` as a process of its own: for exit codes and for the output of a crash."""
    start = f"import sys; from fairseq_cli.{name} import cli_main; sys.exit(cli_main())"
    return subprocess.run(
        [sys.executable, "-c", start, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        cwd=ROOT,
    )


def train(data: Path, save_dir: Path, *flags: str) -> str:
    """Ten updates of a small model, unless the flags say otherwise."""
    defaults = "--optimizer adam --lr 0.01 --tokens-per-sample 16 --batch-size 4 --max-update 10 --disable-validation"
    model = [*TASK, *small_model(*flags), *QUIET, *defaults.split()]
    return command("train", str(data), *model, "--save-dir", str(save_dir), *flags)


def small_model(*flags: str) -> list[str]:
    """The options of `SMALL_MODEL` that are read beside these flags."""
    unread = {"--share-decoder-input-output-embed"} if "--adaptive-softmax-cutoff" in flags else set()
    return [word for word in SMALL_MODEL if word not in unread]


def evaluate(data: Path, checkpoint: Path, *flags: str, task: list[str] = TASK) -> tuple[float, int]:
    """The loss (base 2, from an unrounded perplexity where there is one) and the number of tokens that were scored."""
    from fairseq_cli import eval_lm

    results: dict[str, float] = {}
    original = eval_lm.eval_lm

    def keep(**arguments: object) -> dict[str, float]:
        results.update(original(**arguments))
        return results

    eval_lm.eval_lm = keep  # the log rounds to four digits
    try:
        log = command("eval_lm", str(data), *task, *QUIET, "--path", str(checkpoint), *flags)
    finally:
        eval_lm.eval_lm = original
    found = re.search(r"Evaluated ([\d,]+) tokens", log)
    assert found is not None
    return float(results["loss"]), int(found[1].replace(",", ""))
