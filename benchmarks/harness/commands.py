"""fairseq's commands, each in a process of its own, and texts for them."""

import os
import resource
import subprocess
import sys
from pathlib import Path

from harness import ROOT


def fairseq(command: str, *arguments: str, **environment: str) -> tuple[str, float]:
    """Runs `fairseq-<command>`; returns what it printed and the seconds of CPU time that it used.

    Ends this program where it fails.
    """
    start = f"import sys; from fairseq_cli.{command} import cli_main; sys.exit(cli_main())"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [sys.executable, "-c", start, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if result.returncode != 0:
        sys.exit(f"fairseq-{command} failed:\n{result.stdout[-2000:]}")
    return result.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def binarise(folder: Path, **texts: list[str]) -> Path:
    """Writes the words of each split and binarises them; returns the folder of fairseq's data."""
    prefixes = []
    for split, words in texts.items():
        (folder / f"{split}.txt").write_text(" ".join(words) + "\n")
        prefixes += [f"--{split}pref", str(folder / f"{split}.txt")]
    fairseq("preprocess", "--only-source", "--destdir", str(folder / "bin"), *prefixes)
    return folder / "bin"
