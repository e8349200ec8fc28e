"""Measures again all that docs/performance.md says of a CPU, draws the figures and writes the page.

    python benchmarks/all_cpu.py [--budget 960] [--threads 2]

Wants a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.measuring import duration, positive
from harness.peers.causal_product import DEFAULT_FOLDER
from report import PAGE, RESULTS

HERE = Path(__file__).resolve().parent

# The programs' shares of the budget.
SHARES = {"kernels": 0.38, "generation": 0.1, "translation": 0.31, "training_length": 0.21}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--budget", type=duration, default=960, metavar="SECONDS", help="for measuring (default: %(default)s)"
    )
    parser.add_argument("--threads", type=positive, default=os.cpu_count(), help="default: all cores")
    parser.add_argument("--peers", type=Path, default=DEFAULT_FOLDER, metavar="FOLDER", help="default: build/peers")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="default: benchmarks/results")
    parser.add_argument("--page", type=Path, metavar="FILE", help="default: docs/performance.md")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny cases, to see that the programs run; nothing is kept but in --results and --page",
    )
    options = parser.parse_args()
    if not options.quick:
        measure(options, options.results or RESULTS, options.page or PAGE)
        return
    # What tiny cases take is not to replace what was measured.
    with tempfile.TemporaryDirectory() as scratch:
        measure(options, options.results or Path(scratch), options.page or Path(scratch) / PAGE.name)


def measure(options: argparse.Namespace, results: Path, page: Path) -> None:
    """Runs all programs; their results and figures go to the folder `results`."""
    results = results.resolve()
    outputs = {
        "kernels": ["--out", str(results / "kernels_cpu.json"), "--peers", str(options.peers)],
        "generation": ["--out", str(results / "next_token.json"), "--figure", str(results / "next_token.png")],
        "translation": ["--out", str(results / "translation.json")],
        "training_length": [
            *("--out", str(results / "training_length.json"), "--figure", str(results / "training_length.png")),
            *("--peers", str(options.peers)),
        ],
    }
    quick = ["--quick"] if options.quick else []
    for program, share in SHARES.items():
        run(
            f"{program}.py",
            *("--budget", str(share * options.budget), "--threads", str(options.threads)),
            *outputs[program],
            *quick,
        )
    run("report.py", "--results", str(results), "--page", str(page))


def run(program: str, *arguments: str) -> None:
    """Runs a program of this folder in a process of its own; ends this one where it fails."""
    print(f"benchmarks/{program} {' '.join(arguments)}", file=sys.stderr, flush=True)
    result = subprocess.run([sys.executable, str(HERE / program), *arguments])
    if result.returncode != 0:
        sys.exit(f"{program} failed")


if __name__ == "__main__":
    main()
