from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import options, tasks

import fairseq_fastweights.models.fast_weight_lm
import fairseq_fastweights.models.fast_weight_transformer
import fairseq_fastweights.tasks.fast_weight_language_modeling  # noqa: F401

WORDS = tuple(f"w{i}" for i in range(40))
SIZES = {f"decoder-{name}-dim": 16 for name in ("embed", "input", "output")}
SIZES |= {"decoder-layers": 2, "decoder-attention-heads": 2, "decoder-ffn-embed-dim": 32, "tokens-per-sample": 64}


class Fairseq:
    """Models as fairseq's command lines build them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tasks: dict[tuple[str, ...], Any] = {}

    def data(self, words: Sequence[str] = WORDS) -> Path:
        """A data folder with nothing but a dictionary: 4 special types and `words`, in order."""
        folder = self._folder / f"{abs(hash(tuple(words)))}"
        folder.mkdir(exist_ok=True)
        (folder / "dict.txt").write_text("".join(f"{word} {len(words) - i}\n" for i, word in enumerate(words)))
        return folder

    def parse(self, arch: str, flags: str = "", words: tuple[str, ...] = WORDS) -> Namespace:
        """The options that `fairseq-train` reads from these flags. They are split at spaces."""
        parser = options.get_training_parser("fast_weight_language_modeling")
        return options.parse_args_and_arch(parser, [str(self.data(words)), "--arch", arch, *flags.split()])

    def tiny(self, arch: str, flags: str = "", words: tuple[str, ...] = WORDS) -> Namespace:
        """The same, at the sizes of `SIZES` where `flags` say nothing else."""
        sizes = [f"--{name} {n}" for name, n in SIZES.items() if f"--{name} " not in f"{flags} "]
        return self.parse(arch, " ".join([*sizes, flags]), words)

    def task(self, words: tuple[str, ...] = WORDS) -> Any:
        if words not in self._tasks:
            self._tasks[words] = tasks.setup_task(self.tiny("fast_weight_lm", words=words))
        return self._tasks[words]

    def build(self, flags: str = "", *, arch: str = "fast_weight_lm", words: tuple[str, ...] = WORDS, seed=0) -> Any:
        """A tiny model, in evaluation mode."""
        args = self.tiny(arch, flags, words)  # hydra's configuration of them, as fairseq-train has it, takes long
        torch.manual_seed(seed)
        return self.task(words).build_model(args).eval()


@pytest.fixture(scope="session")
def fairseq(tmp_path_factory) -> Fairseq:
    return Fairseq(tmp_path_factory.mktemp("fairseq"))


@pytest.fixture(scope="session")
def text():
    """`text(batch, time, seed=0)`: tokens without padding, special types left out."""
    return lambda *size, seed=0: torch.randint(4, 44, size, generator=torch.Generator().manual_seed(seed))
