"""Trained models of both kinds, a tiny parallel corpus, and fairseq's commands for translation on it."""

import math
import multiprocessing
import os
import random
import re
import shutil
import signal
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import data_utils
from filelock import FileLock

from tests.conftest import QUIET, TASK, command, import_plugin, small_model, train

TRANSLATION = [*TASK[:2], *"--task translation --source-lang en --target-lang de".split()]
SMALL = "--arch fast_weight_transformer_tiny --encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --dropout 0".split()


def slow(*values: Any) -> Any:
    """A case that `make test-fast` leaves out: others of the same test run there."""
    return pytest.param(*values, marks=pytest.mark.slow)


def losses(log: str, name: str = "loss") -> list[float]:
    """The values that were logged under this name, all of them finite."""
    found = [float(x) for x in re.findall(rf'"{name}": "([^"]+)"', log)]
    assert found and all(map(math.isfinite, found))
    return found


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The model's, without the numbers whose type fairseq looks at, and whose value it never sets."""
    state = torch.load(checkpoint, weights_only=True)["model"]
    return {name: x for name, x in state.items() if not name.endswith("_float_tensor")}


def forked(run: Callable[[], object]) -> int | None:
    """The exit code of a process that does this; forked, as to import fairseq anew would take longer."""

    def begin() -> None:
        # Also where the tests run in a shell's background, or under nohup.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        run()

    process = multiprocessing.get_context("fork").Process(target=begin)
    process.start()
    process.join(timeout=300)
    process.kill()
    return process.exitcode


@torch.no_grad()
def loss_alone(data: Path, checkpoint: Path, *, apart: bool = False, new: int = 10**6, context: int = 0) -> float:
    """The base-2 loss of the test split as one text, or of each document by itself, by none of the readers under test.

    In windows, if `new` says so: of `new` tokens, after as many of the text's before them as fit into `context`.
    """
    [model], _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], {"data": str(data)})
    model.eval()
    lines, known, loss = (
        data_utils.load_indexed_dataset(str(data / "test"), task.dictionary),
        task.target_dictionary,
        0.0,
    )
    texts: list[list[int]] = [[]]
    for before, line in zip([[], *lines], lines, strict=False):
        if apart and len(before) == 1 and len(line) > 1:
            texts.append([])
        texts[-1] += line.tolist()
    assert len(texts) > 1 or not apart
    for tokens in texts:
        text = torch.tensor([task.dictionary.eos(), *tokens])[None]
        for first in range(0, len(tokens), new):
            start, end = max(0, first - context), min(first + new, len(tokens))
            target = text[:, first + 1 : end + 1]
            target = target.masked_fill(target >= len(known), known.unk())[..., None]
            scores = model.get_normalized_probs(model(text[:, start:end]), log_probs=True)
            loss -= scores[:, first - start :].gather(-1, target).sum().item()
    return loss / sum(map(len, texts)) / math.log(2)


def train_in_processes(folder: Path, *arguments: str, processes: int, prepare: Callable[[], object] = int) -> str:
    """fairseq-train in so many processes, which call `prepare` first.

    Returns the first one's log; checkpoints go to `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meeting").unlink(missing_ok=True)  # of a run before
    common = ["--save-dir", str(folder), "--distributed-backend", "gloo"]
    if processes > 1:
        common += ["--distributed-init-method", f"file://{folder}/meeting", "--distributed-no-spawn"]
    common += ["--distributed-world-size", str(processes), "--distributed-rank"]

    def run(rank: int) -> None:
        prepare()
        (folder / f"{rank}.log").write_text(command("train", *arguments, *common, str(rank)))

    # Forked: to import fairseq anew would take longer than the training.
    started = [multiprocessing.get_context("fork").Process(target=run, args=(rank,)) for rank in range(processes)]
    for process in started:
        process.start()
    for process in started:
        process.join(timeout=300)
        process.kill()
    assert [process.exitcode for process in started] == [0] * processes
    return (folder / "0.log").read_text()


def train_in_two(data: Path, folder: Path, *flags: str, processes: int = 2, **options: Any) -> str:
    """A language model, in two processes or as many as `processes` says; see `train_in_processes`."""
    common = [*TASK, *small_model(*flags), *QUIET, "--optimizer", "adam"]
    common += "--tokens-per-sample 16 --batch-size 4 --ddp-backend legacy_ddp".split()
    return train_in_processes(folder, str(data), *common, *flags, processes=processes, **options)


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """`once(name, fill)`: a folder that `fill` fills, once for all processes of the session."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def made(name: str, fill: Callable[[Path], object]) -> Path:
        folder, unfinished = shared / name, shared / f"{name}.unfinished"
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                shutil.rmtree(unfinished, ignore_errors=True)
                fill(unfinished)
                unfinished.rename(folder)
        return folder

    return made


@pytest.fixture(scope="session")
def model(corpus: Path, once) -> Callable[..., Path]:
    """`model(*flags)`: a checkpoint of a language model that has learned enough for contexts to matter."""

    def trained(*flags: str) -> Path:
        name = re.sub(r"[^\w,.]+", "_", "".join(("model", *flags)))
        return once(name, lambda folder: train(corpus, folder, "--max-update", "40", *flags)) / "checkpoint_last.pt"

    return trained


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences of 20 words and the same in reverse, binarised; the 3rd of each split has an empty source.

    In `joined` beside it with one dictionary for both languages.
    """
    import_plugin()
    draw, folder = random.Random(0), tmp_path_factory.mktemp("pairs")
    for split, size in (("train", 80), ("valid", 12), ("test", 12)):
        source = [" ".join(draw.choices([f"e{i}" for i in range(20)], k=draw.randint(1, 9))) for _ in range(size)]
        source[2::20] = [""] * len(source[2::20])
        # fairseq takes no empty prefixes.
        reverse = [" ".join(reversed(line.replace("e", "d").split())) or "d0" for line in source]
        for language, lines in (("en", source), ("de", reverse)):
            (folder / f"{split}.{language}").write_text("".join(f"{line}\n" for line in lines))
    prefixes = [word for split in ("train", "valid", "test") for word in (f"--{split}pref", str(folder / split))]
    for out, flags in (("bin", []), ("joined", ["--joined-dictionary"])):
        command("preprocess", *TRANSLATION[-4:], "--destdir", str(folder / out), *prefixes, *flags)
    return folder / "bin"


def train_translation(data: Path, save_dir: Path, *flags: str, validate: bool = False, processes: int = 1) -> str:
    """Four updates of a small model, unless the flags say otherwise."""
    defaults = "--optimizer adam --lr 0.003 --max-tokens 160 --max-update 4 --seed 1".split()
    defaults += [] if validate else ["--disable-validation"]
    if "--criterion" not in flags:
        defaults += "--criterion label_smoothed_cross_entropy --label-smoothing 0.1".split()
    arguments = [str(data), *TRANSLATION, *SMALL, *QUIET, *defaults, *flags]
    if processes > 1:
        return train_in_processes(save_dir, *arguments, processes=processes)
    return command("train", *arguments, "--save-dir", str(save_dir))


@pytest.fixture(scope="session")
def translator(pairs, once) -> Path:
    """A checkpoint after 36 updates."""
    flags = "--update-rule delta --feature-map dpfp --max-update 36 --no-epoch-checkpoints".split()
    return once("translator", lambda folder: train_translation(pairs, folder, *flags)) / "checkpoint_last.pt"


Hypothesis = namedtuple("Hypothesis", "score words token_scores")  # the latter base 2, rounded to 4 digits


def hypotheses_in(output: str) -> dict[int, list[Hypothesis]]:
    """By the sentence's number, best first."""
    found: dict[int, list[Hypothesis]] = {}
    for number, score, text, scores in re.findall(r"^H-(\d+)\t(\S+)\t(.*)\nD-.*\nP-\d+\t(.*)$", output, re.MULTILINE):
        hypothesis = Hypothesis(float(score), text.split(), [float(x) for x in scores.split()])
        found.setdefault(int(number), []).append(hypothesis)
    return found


def generate(data: Path, path: Path, results: Path, *flags: str) -> dict[int, list[Hypothesis]]:
    """Runs fairseq-generate on the test split, with a beam of 4 unless the flags say otherwise."""
    defaults = ["--path", str(path), "--beam", "4", "--max-len-b", "12", "--results-path", str(results)]
    command("generate", str(data), *TRANSLATION, *QUIET, "--batch-size", "5", *defaults, *flags)
    (output,) = results.iterdir()
    return hypotheses_in(output.read_text(encoding="utf-8"))
