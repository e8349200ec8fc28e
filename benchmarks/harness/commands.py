"""fairseq's commands, each in a process of its own, and texts for them."""

import os
import subprocess
import sys
from pathlib import Path

from harness import ROOT


def fairseq(command: str, *arguments: str, **environment: str) -> tuple[str, float]:
    """Runs `fairseq-<command>`; returns what it printed and the seconds of CPU time that it used.

    Ends this program where it fails.
    """
    start = f"import sys; from fairseq_cli.{command} import cli_main; sys.exit(cli_main())"
    words, env, before = [sys.executable, "-c", start, *arguments], os.environ | environment, os.times()
    result = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=env)
    after = os.times()
    if result.returncode != 0:
        sys.exit(f"fairseq-{command} failed:\n{result.stdout[-2000:]}")
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return result.stdout, used


def binarise(folder: Path, **texts: list[str]) -> Path:
    """Writes the words of each split and binarises them; returns the folder of fairseq's data."""
    prefixes = []
    for split, words in texts.items():
        (folder / f"{split}.txt").write_text(" ".join(words) + "\n")
        prefixes += [f"--{split}pref", str(folder / f"{split}.txt")]
    fairseq("preprocess", "--only-source", "--destdir", str(folder / "bin"), *prefixes)
    return folder / "bin"
