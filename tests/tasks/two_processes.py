"""fairseq-train in two processes, forked: to import fairseq anew would take longer than the training."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

from tests.conftest import QUIET, SMALL_MODEL, TASK, command


def train_in_two(data: Path, folder: Path, *flags: str) -> str:
    """What the first process logs; checkpoints go to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    common = [
        *[str(data), *TASK, *SMALL_MODEL, *QUIET, "--optimizer", "adam", "--save-dir", str(folder), *flags],
        *["--tokens-per-sample", "16", "--batch-size", "4", "--ddp-backend", "legacy_ddp"],
        *["--distributed-backend", "gloo", "--distributed-world-size", "2", "--distributed-no-spawn"],
        *["--distributed-init-method", f"file://{folder}/meeting", "--distributed-rank"],
    ]

    def run(rank: int) -> None:
        (folder / f"{rank}.log").write_text(command("train", *common, str(rank)))

    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=run, args=(rank,)) for rank in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(timeout=300)
        process.kill()
    assert [process.exitcode for process in both] == [0, 0]
    return (folder / "0.log").read_text()
