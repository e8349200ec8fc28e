"""Measures again all that docs/performance.md says of a CPU, draws the figures and writes the page.

    python benchmarks/all_cpu.py [--budget 960] [--threads 2]

Wants a machine with nothing else to do.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.program import duration, make_parser, positive
from report import PAGE, RESULTS

# By the name of its results: its share of the budget, its program and options, and whether it draws a figure.
RUNS = {
    "kernels_cpu": (0.38, "kernels.py", (), False),
    "next_token": (0.1, "generation.py", (), True),
    "translation": (0.31, "translation.py", (), False),
    "training_length": (0.21, "kernels.py", ("--lengths",), True),
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--budget", type=duration, default=960, metavar="SECONDS", help="default: %(default)s")
    parser.add_argument("--threads", type=positive, default=os.cpu_count(), help="default: all cores")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="default: benchmarks/results")
    parser.add_argument("--page", type=Path, metavar="FILE", help="default: docs/performance.md")
    text = "tiny cases, to see that the programs run; nothing is kept but in --results and --page"
    parser.add_argument("--quick", action="store_true", help=text)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        # What tiny cases take is not to replace what was measured.
        results, page = (Path(scratch), Path(scratch) / PAGE.name) if options.quick else (RESULTS, PAGE)
        results, page = (options.results or results).resolve(), options.page or page
        common = ["--threads", str(options.threads), *(["--quick"] if options.quick else [])]
        for name, (share, program, more, figure) in RUNS.items():
            files = ["--out", str(results / f"{name}.json")]
            files += ["--figure", str(results / f"{name}.png")] if figure else []
            run(program, *more, "--budget", str(share * options.budget), *common, *files)
        run("report.py", "--results", str(results), "--page", str(page))


def run(program: str, *arguments: str) -> None:
    """Runs a program of this folder in a process of its own; ends this one where it fails."""
    print(f"benchmarks/{program} {' '.join(arguments)}", file=sys.stderr, flush=True)
    if subprocess.run([sys.executable, str(Path(__file__).with_name(program)), *arguments]).returncode != 0:
        sys.exit(f"{program} failed")


if __name__ == "__main__":
    main()
