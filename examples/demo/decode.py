#!/usr/bin/env python
"""Times decode steps of trained language models after short and long texts, and sizes what they keep of a text.

    decode.py DATA CHECKPOINT ...

Several texts of random tokens are decoded at once. The models take turns, and the fastest step of each counts, so that
other work on the machine matters little.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import torch

from fairseq_fastweights.conversion.trained_models import load_for_causal_lm
from fairseq_fastweights.suggestions import ArgumentParser

LENGTHS = (64, 4096)
TEXTS, STEPS = 8, 40


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each model and length; returns the exit status."""
    parser = ArgumentParser(description="Decode steps and states of trained language models.")
    parser.add_argument("data", type=Path, metavar="DATA", help="the data that the models were trained on")
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT", help="the trained models")
    options = parser.parse_args(arguments)
    models = [load_for_causal_lm(path, data=options.data)[0] for path in options.checkpoints]
    for length in LENGTHS:
        tokens = torch.randint(4, models[0].config.vocab_size, (TEXTS, length))
        caches = [model(tokens, use_cache=True, logits_to_keep=1).past_key_values for model in models]
        sizes, fastest = [cache.bytes() / TEXTS for cache in caches], [math.inf] * len(models)
        for _ in range(STEPS):
            for i, (model, cache) in enumerate(zip(models, caches, strict=True)):
                started = time.perf_counter()
                model(tokens[:, :1], past_key_values=cache)
                fastest[i] = min(fastest[i], time.perf_counter() - started)
        for path, size, seconds in zip(options.checkpoints, sizes, fastest, strict=True):
            print(f"{path}: after {length} tokens {size:.0f} bytes, {1000 * seconds:.3f} ms", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
