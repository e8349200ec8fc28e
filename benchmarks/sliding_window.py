"""Sliding-window evaluation against fairseq's own, on the same checkpoint with the same flags, in one run.

A model of 2 layers of width 64 scores a text over a vocabulary of 10,000 with windows of 64 tokens, one new token each.
The two commands take turns; their CPU times are compared. Needs only the environment of `make setup`:

    .venv/bin/python benchmarks/sliding_window.py [--tokens 4000] [--rounds 3]
"""

import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import ROOT
from harness.program import make_parser, positive

LENGTH, BATCH = 64, 64
TYPES = 10_000
TASKS = {"fairseq": "language_modeling", "fairseq_fastweights": "fast_weight_language_modeling"}


def fairseq(command: str, *arguments: str, **environment: str) -> tuple[str, float]:
    """Runs `fairseq-<command>`; returns its output and its CPU time in seconds. Ends this program if it fails."""
    start = f"import sys; from fairseq_cli.{command} import cli_main; sys.exit(cli_main())"
    words, env, before = [sys.executable, "-c", start, *arguments], os.environ | environment, os.times()
    result = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=env)
    after = os.times()
    if result.returncode != 0:
        sys.exit(f"fairseq-{command} failed:\n{result.stdout[-2000:]}")
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return result.stdout, used


def binarise(folder: Path, **texts: list[str]) -> Path:
    """Writes and binarises the text of each split; returns the folder of fairseq's data."""
    prefixes = []
    for split, words in texts.items():
        (folder / f"{split}.txt").write_text(" ".join(words) + "\n")
        prefixes += [f"--{split}pref", str(folder / f"{split}.txt")]
    fairseq("preprocess", "--only-source", "--destdir", str(folder / "bin"), *prefixes)
    return folder / "bin"


def prepare(folder: Path, tokens: int) -> tuple[Path, Path]:
    """Makes a text whose training part has the whole vocabulary, and a model after five updates."""
    draw = random.Random(1)
    words = [f"w{i}" for i in range(TYPES - 4)]
    data = binarise(folder, train=words, valid=draw.choices(words, k=50), test=draw.choices(words, k=tokens - 1))
    flags = f"""--user-dir fairseq_fastweights --task {TASKS["fairseq_fastweights"]} --arch fast_weight_lm
        --decoder-layers 2 --decoder-embed-dim 64 --decoder-input-dim 64 --decoder-output-dim 64
        --decoder-ffn-embed-dim 256 --decoder-attention-heads 4 --share-decoder-input-output-embed
        --tokens-per-sample {LENGTH} --batch-size 8 --max-update 5 --optimizer adam --lr 0.001 --cpu --num-workers 0
        --disable-validation --save-dir {folder / "model"}"""
    fairseq("train", str(data), *flags.split(), OMP_NUM_THREADS="1")
    return data, folder / "model" / "checkpoint_last.pt"


def measure(data: Path, checkpoint: Path, task: str, window: bool) -> tuple[float, float]:
    """The loss, and the CPU time in seconds."""
    # Without a window each token is read once: almost only the start of the process, which both have.
    flags = f"""--user-dir fairseq_fastweights --task {task} --path {checkpoint} --cpu --num-workers 0
        --no-progress-bar --batch-size {BATCH} --tokens-per-sample {LENGTH}
        {f"--context-window {LENGTH - 1}" if window else ""}"""
    text, seconds = fairseq("eval_lm", str(data), *flags.split(), OMP_NUM_THREADS="1")
    [loss] = re.findall(r"Loss \(base 2\): ([\d.]+)", text)
    return float(loss), seconds


def main() -> None:
    parser = make_parser(__doc__, "--rounds", rounds=3)
    parser.add_argument("--tokens", type=positive, default=4000, help="to score (default: %(default)s)")
    options = parser.parse_args()
    losses: dict[str, float] = {}
    seconds: dict[str, list[float]] = {peer: [] for peer in TASKS}
    with tempfile.TemporaryDirectory() as name:
        data, checkpoint = prepare(Path(name), options.tokens)
        # The start of a process, which the ratio leaves out of both.
        _, start = measure(data, checkpoint, TASKS["fairseq"], window=False)
        for _ in range(options.rounds):
            for peer, task in TASKS.items():
                losses[peer], used = measure(data, checkpoint, task, window=True)
                seconds[peer].append(used)
    fairseqs, ours = (statistics.median(seconds[peer]) for peer in TASKS)
    figures = {
        **{"tokens": options.tokens, "batch size": BATCH, "loss (base 2)": losses},
        **{"CPU seconds, whole process": seconds, "CPU seconds of a process that reads each token once": start},
        **{"ratio, whole process": fairseqs / ours, "ratio, without that": (fairseqs - start) / (ours - start)},
    }
    print("{\n" + ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in figures.items()) + "\n}")


if __name__ == "__main__":
    main()
