"""Writes all tables from the results in benchmarks/results and the text in benchmarks/page.md.

python benchmarks/report.py [--results FOLDER] [--page FILE]
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from harness import ROOT, pages, records, targets
from harness.pages import Record, count
from harness.program import make_parser

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "build" / "performance.md"

# The head, and by program, in the page's order, title and text of its section.
HEAD, *_words = re.split(r"\n%% (\w+): (.*)\n", (ROOT / "benchmarks" / "page.md").read_text())
SECTIONS = {name: (title, " ".join(text.split())) for name, title, text in zip(*[iter(_words)] * 3, strict=True)}


def find_records(folder: Path) -> list[tuple[Path, Record]]:
    """The results in a folder, by program, device and date. A file is a record, or an object that holds some."""
    files = [(path, records.read(path)) for path in sorted(folder.glob("*.json"))]
    found = [(path, record) for path, content in files for record in (content, *content.values())]
    known = [(path, x) for path, x in found if isinstance(x, dict) and x.get("program") in SECTIONS]
    order = list(SECTIONS)
    return sorted(known, key=lambda item: (order.index(item[1]["program"]), item[1]["device"], item[1]["date"]))


def render(results: Sequence[tuple[Path, Record]], page: Path) -> str:
    """The page, as it is at the path `page`: its links start there."""
    parts = [HEAD, targets.render(targets.evaluate([record for _, record in results if records.is_current(record)]))]
    for path, record in results:
        (title, text), where = SECTIONS[record["program"]], "GPU" if record["device"] == "cuda" else "CPU"
        link = os.path.relpath(path, page.parent)
        parts.append(f"## {title}, {where}\n")
        if not records.is_current(record):
            was = f"[its results of {record['date'][:10]}]({link}) have another meaning"
            parts.append(f"Not measured as {record['program']} measures now; {was}.\n")
            continue
        machine, versions = record["machine"], record["versions"]
        gpu = f"{machine['gpu']}, " if "gpu" in machine else ""
        load = f", load before the run {machine['load before']:g}" if "load before" in machine else ""
        measured_on = (
            f"Measured on: {gpu}{machine['cpu']} ({machine['capability']}), {count(record['threads'], 'thread')} on "
            f"{count(machine['cores'], 'core')}, torch {versions['torch']}, Python {versions['python']}, "
            f"{record['date'][:10]}{load}. ([JSON]({link}))\n"
        )
        parts += [f"{text}\n", measured_on, pages.render(record)]
        figure = path.with_suffix(".png")
        if figure.exists():
            parts.append(f"![{title}, {where}]({os.path.relpath(figure, page.parent)})\n")
    return "\n".join(parts)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="default: benchmarks/results")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="default: build/performance.md")
    options = parser.parse_args()
    page = options.page.resolve()
    results = find_records(options.results.resolve())
    if not results:
        missing = "holds no results" if options.results.is_dir() else "is no folder"
        parser.error(f"--results is {options.results}, which {missing}; it must be where benchmarks/*.py wrote theirs")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render(results, page))


if __name__ == "__main__":
    main()
