"""Measures the rules, decode steps and lengths on a CPU again, draws the figures and writes the tables.

    python benchmarks/all_cpu.py [--budget 960] [--threads 2]

Wants a machine with nothing else to do.
"""

import os
import subprocess
import sys
from pathlib import Path

from harness.program import make_parser
from report import RESULTS

# By the name of its results: its share of the budget, its program and options, and whether it draws a figure.
RUNS = {
    "kernels_cpu": (0.38, "kernels.py", (), False),
    "next_token": (0.1, "generation.py", (), True),
    "translation": (0.31, "translation.py", (), False),
    "training_length": (0.21, "kernels.py", ("--lengths",), True),
}


def main() -> None:
    parser = make_parser(__doc__, "--budget", "--threads")
    parser.set_defaults(budget=960, threads=os.cpu_count())
    options = parser.parse_args()
    for name, (share, program, more, figure) in RUNS.items():
        files = ["--out", str(RESULTS / f"{name}.json")]
        files += ["--figure", str(RESULTS / f"{name}.png")] if figure else []
        run(program, *more, "--budget", str(share * options.budget), "--threads", str(options.threads), *files)
    run("report.py")


def run(program: str, *arguments: str) -> None:
    """Runs a program of this folder in a process of its own; ends this one where it fails."""
    print(f"benchmarks/{program} {' '.join(arguments)}", file=sys.stderr, flush=True)
    if subprocess.run([sys.executable, str(Path(__file__).with_name(program)), *arguments]).returncode != 0:
        sys.exit(f"{program} failed")


if __name__ == "__main__":
    main()
