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

# By program: its share of the budget, the name of its results, and whether it takes peers and draws a figure.
PROGRAMS = {
    "kernels": (0.38, "kernels_cpu", True, False),
    "generation": (0.1, "next_token", False, True),
    "translation": (0.31, "translation", False, False),
    "training_length": (0.21, "training_length", True, True),
}


def main() -> None:
    parser = make_parser(__doc__, "--peers")
    parser.add_argument("--budget", type=duration, default=960, metavar="SECONDS", help="default: %(default)s")
    parser.add_argument("--threads", type=positive, default=os.cpu_count(), help="default: all cores")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="default: benchmarks/results")
    parser.add_argument("--page", type=Path, metavar="FILE", help="default: docs/performance.md")
    text = "tiny cases, to see that the programs run; nothing is kept but in --results and --page"
    parser.add_argument("--quick", action="store_true", help=text)
    options = parser.parse_args()
    quick = ["--quick"] if options.quick else []
    with tempfile.TemporaryDirectory() as scratch:
        # What tiny cases take is not to replace what was measured.
        results, page = (Path(scratch), Path(scratch) / PAGE.name) if quick else (RESULTS, PAGE)
        results, page = (options.results or results).resolve(), options.page or page
        for program, (share, name, peers, figure) in PROGRAMS.items():
            arguments = ["--budget", str(share * options.budget), "--threads", str(options.threads)]
            arguments += ["--out", str(results / f"{name}.json")]
            arguments += ["--figure", str(results / f"{name}.png")] if figure else []
            run(f"{program}.py", *arguments, *(["--peers", str(options.peers)] if peers else []), *quick)
        run("report.py", "--results", str(results), "--page", str(page))


def run(program: str, *arguments: str) -> None:
    """Runs a program of this folder in a process of its own; ends this one where it fails."""
    print(f"benchmarks/{program} {' '.join(arguments)}", file=sys.stderr, flush=True)
    if subprocess.run([sys.executable, str(Path(__file__).resolve().parent / program), *arguments]).returncode != 0:
        sys.exit(f"{program} failed")


if __name__ == "__main__":
    main()
