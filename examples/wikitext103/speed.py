#!/usr/bin/env python
"""Measures how fast models that wikitext2.sh trained train and generate, and counts what they remember.

    speed.py DATA OUT [MODEL ...]

DATA is what they were trained on, OUT has one folder for each model. Models take turns, in one thread; the fastest turn
counts. Into each folder goes speed.json, which summarize.py reads:

    "state"      numbers that one text leaves behind after 256 words: what a generation keeps beside the parameters
    "training"   words per second of a forward and backward pass over 4 segments of 256; models that carry their state
                 from segment to segment read that of the segments before
    "generation" words per second, one at a time, after 128 of them, up to 256
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.files import write_whole

ROOT = Path(__file__).resolve().parents[2]
ROWS, LENGTH = 4, 256


class Measured:
    """A trained model and the words that it is measured with."""

    def __init__(self, folder: Path, data: Path) -> None:
        from fairseq import checkpoint_utils
        from fairseq.data import data_utils

        (self.model,), config, task = checkpoint_utils.load_model_ensemble_and_task(
            [str(folder / "checkpoint_best.pt")], arg_overrides={"data": str(data)}
        )
        self.criterion = task.build_criterion(config.criterion)
        lines = data_utils.load_indexed_dataset(str(data / "test"), task.dictionary)
        read = torch.cat([lines[i] for i in range(min(len(lines), 200))]).long()
        stream = read.repeat(1 + ROWS * LENGTH // len(read))[: ROWS * LENGTH + 1]
        self.words, self.targets = (x.view(ROWS, LENGTH) for x in (stream[:-1], stream[1:]))
        self.carries = task.args.carry_over_state
        self.continues = torch.zeros(ROWS, dtype=torch.bool)
        self.train()  # not timed: it finds its memory, and has no segment before it

    def train(self) -> float:
        """Words per second."""
        self.model.train()
        net_input = {"src_tokens": self.words, "src_lengths": torch.full((ROWS,), LENGTH)}
        if self.carries:
            net_input["continues"] = self.continues
        sample = {"id": torch.arange(ROWS), "net_input": net_input, "target": self.targets}
        sample |= {"ntokens": ROWS * LENGTH, "nsentences": ROWS}
        begin = time.perf_counter()
        self.criterion(self.model, sample)[0].backward()
        seconds = time.perf_counter() - begin
        self.model.zero_grad()
        self.continues = torch.ones_like(self.continues)
        return ROWS * LENGTH / seconds

    @torch.no_grad()
    def generate(self, state: dict[Any, Any]) -> float:
        """Words per second; `state` is left as it is after the last one."""
        self.model.eval()
        for read in range(1, LENGTH + 1):
            if read == LENGTH // 2 + 1:
                begin = time.perf_counter()
            out = self.model(self.words[:1, :read], incremental_state=state)
            self.model.get_normalized_probs((out[0], None), log_probs=True)
        return (LENGTH - LENGTH // 2) / (time.perf_counter() - begin)


def main(arguments: list[str] | None = None) -> int:
    """Writes a file into each folder; returns the exit status."""
    parser = argparse.ArgumentParser(description="Speed and state size of trained language models.")
    parser.add_argument("data", type=Path, metavar="DATA", help="what the models were trained on")
    parser.add_argument("out", type=Path, metavar="OUT", help="holds one folder for each model")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="names of folders in OUT (default: all)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of each model (default: 5)")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; it must be at least 1")
    folders = [options.out / name for name in options.models] or sorted(x.parent for x in options.out.glob("*/trained"))
    if missing := [x for x in folders if not (x / "checkpoint_best.pt").exists()]:
        parser.error(f"{missing[0]} holds no checkpoint_best.pt; wikitext2.sh trains the model")
    if not folders:
        parser.error(f"OUT is {options.out}, which holds no trained model; wikitext2.sh trains them")
    if not (options.data / "dict.txt").exists():
        parser.error(f"DATA is {options.data}, which holds no dict.txt; prepare.sh makes it")
    from fairseq import utils

    torch.set_num_threads(1)
    utils.import_user_module(argparse.Namespace(user_dir=str(ROOT / "fairseq_fastweights")))
    models = {folder: Measured(folder, options.data) for folder in folders}
    fastest: dict[Path, dict[str, float]] = {folder: {} for folder in folders}
    for _ in range(options.rounds):
        for folder, model in models.items():
            state: dict[Any, Any] = {}
            turns: dict[str, Callable[[], float]] = {
                "training": model.train,
                "generation": lambda model=model, state=state: model.generate(state),
            }
            for name, turn in turns.items():
                fastest[folder][name] = max(turn(), fastest[folder].get(name, 0.0))
            tensors = [x for buffer in state.values() for x in buffer.values() if x is not None]
            fastest[folder]["state"] = sum(x.numel() for x in tensors if x.is_floating_point())
    for folder, found in fastest.items():
        write_whole(folder / "speed.json", json.dumps(found) + "\n")
        print(f"{folder.name}: " + ", ".join(f"{name} {number:,.0f}" for name, number in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
