"""Sliding-window evaluation against fairseq's own, on the same checkpoint with the same flags, in one run.

A model of 2 layers of width 64 scores a text of 10,000 word types with windows of 64 tokens, one new token
each. The two commands take turns, and what counts is the time that each process used, not the time that passed. Needs
nothing but the environment that `make setup` makes:

    .venv/bin/python benchmarks/sliding_window.py [--tokens 4000] [--rounds 3] [--batch-size 64]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.measuring import positive

ROOT = Path(__file__).resolve().parents[1]
LENGTH = 64
TYPES = 10_000
TASKS = {"fairseq": "language_modeling", "fairseq_fastweights": "fast_weight_language_modeling"}


def run(command: str, *arguments: str) -> tuple[str, float]:
    """Runs `fairseq-<command>` and returns what it printed and the seconds of CPU time that it used."""
    start = f"import sys; from fairseq_cli.{command} import cli_main; sys.exit(cli_main())"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [sys.executable, "-c", start, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if result.returncode != 0:
        sys.exit(f"fairseq-{command} failed:\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}")
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return result.stdout + result.stderr, seconds


def prepare(folder: Path, tokens: int) -> tuple[Path, Path]:
    """Makes a text with all word types in its training part, and a model that has seen a little of it."""
    draw = random.Random(1)
    words = [f"w{i}" for i in range(TYPES - 4)]
    for split, size in (("train", 0), ("valid", 50), ("test", tokens - 1)):
        (folder / f"{split}.txt").write_text(" ".join(words if not size else draw.choices(words, k=size)) + "\n")
    prefixes = [word for s in ("train", "valid", "test") for word in (f"--{s}pref", str(folder / f"{s}.txt"))]
    run("preprocess", "--only-source", "--destdir", str(folder / "bin"), *prefixes)
    flags = f"""--user-dir fairseq_fastweights --task {TASKS["fairseq_fastweights"]} --arch fast_weight_lm
        --decoder-layers 2 --decoder-embed-dim 64 --decoder-input-dim 64 --decoder-output-dim 64
        --decoder-ffn-embed-dim 256 --decoder-attention-heads 4 --share-decoder-input-output-embed
        --tokens-per-sample {LENGTH} --batch-size 8 --max-update 5 --optimizer adam --lr 0.001 --cpu --num-workers 0
        --disable-validation --save-dir {folder / "model"}"""
    run("train", str(folder / "bin"), *flags.split())
    return folder / "bin", folder / "model" / "checkpoint_last.pt"


def measure(data: Path, checkpoint: Path, task: str, batch: int, window: bool) -> tuple[float, float]:
    flags = f"""--user-dir fairseq_fastweights --task {task} --path {checkpoint} --cpu --num-workers 0
        --no-progress-bar --batch-size {batch}"""
    # Without a window each token is read once: next to nothing but the process's start, which both have.
    sizes = ["--tokens-per-sample", str(LENGTH), *(["--context-window", str(LENGTH - 1)] if window else [])]
    text, seconds = run("eval_lm", str(data), *flags.split(), *sizes)
    found = re.search(r"Loss \(base 2\): ([\d.]+)", text)
    assert found is not None
    return float(found[1]), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=positive, default=4000, help="tokens to score (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="times that each is measured (default: %(default)s)")
    parser.add_argument("--batch-size", type=positive, default=64, help="windows per batch (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        data, checkpoint = prepare(Path(name), options.tokens)
        start = measure(data, checkpoint, TASKS["fairseq"], options.batch_size, window=False)[1]
        losses: dict[str, float] = {}
        seconds: dict[str, list[float]] = {peer: [] for peer in TASKS}
        for _ in range(options.rounds):
            for peer, task in TASKS.items():
                losses[peer], used = measure(data, checkpoint, task, options.batch_size, window=True)
                seconds[peer].append(used)
    whole = {peer: statistics.median(times) for peer, times in seconds.items()}
    scoring = {peer: median - start for peer, median in whole.items()}
    figures = {
        "tokens": options.tokens,
        "batch size": options.batch_size,
        "loss (base 2)": losses,
        "CPU seconds, whole process": seconds,
        "CPU seconds of a process that reads each token once": start,
        "ratio, whole process": whole["fairseq"] / whole["fairseq_fastweights"],
        "ratio, without that": scoring["fairseq"] / scoring["fairseq_fastweights"],
    }
    print(json.dumps(figures, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
