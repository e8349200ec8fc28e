#!/usr/bin/env python
"""Counts a trained language model's state: the numbers that a generation keeps beside the parameters.

    state_size.py DATA CHECKPOINT

The model reads 256 words of the test set one at a time, as in generation. All floating-point numbers that it then keeps
count: matrices, normalisers, caches of keys and values, the inputs that a short convolution still needs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from fairseq_fastweights.suggestions import ArgumentParser

ROOT = Path(__file__).resolve().parents[2]
WORDS = 256


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    """Prints the number; returns the exit status."""
    parser = ArgumentParser(description="The size of a language model's state.")
    parser.add_argument("data", type=Path, metavar="DATA", help="the data that the model was trained on")
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="the trained model")
    options = parser.parse_args(arguments)
    for name, path in (("DATA", options.data / "dict.txt"), ("CHECKPOINT", options.checkpoint)):
        if not path.exists():
            parser.error(f"argument {name}: there is no {path}")
    from fairseq import checkpoint_utils, utils
    from fairseq.data import data_utils

    utils.import_user_module(argparse.Namespace(user_dir=str(ROOT / "fairseq_fastweights")))
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(options.checkpoint)], arg_overrides={"data": str(options.data)}
    )
    model.eval()
    lines = data_utils.load_indexed_dataset(str(options.data / "test"), task.dictionary)
    words = torch.cat([lines[i] for i in range(min(len(lines), WORDS))]).long()[None].repeat(1, WORDS)
    state: dict[Any, Any] = {}
    for read in range(1, WORDS + 1):
        model(words[:, :read], incremental_state=state)
    # Of every layer's buffers; positions and lengths are integers and do not count.
    kept = [x for buffer in state.values() for x in buffer.values() if x is not None]
    print(f"State: {sum(x.numel() for x in kept if x.is_floating_point()):,} numbers after {WORDS} words")
    return 0


if __name__ == "__main__":
    sys.exit(main())
