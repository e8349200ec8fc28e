#!/usr/bin/env python
"""Trains rows of the papers' tables, and scores them as the papers do.

    reproduce.py TABLE ROW train [SOURCE] DATA OUT [OPTION ...]    called again, it goes on where it stopped
    reproduce.py TABLE ROW evaluate DATA OUT [OPTION ...]          a score that is there is not computed again
    reproduce.py --print TABLE ROW ...                             the commands that this would run, to copy
    reproduce.py --list [TABLE]                                    the tables and their rows, with the paper's numbers
    reproduce.py run TABLE DATA OUT [--rows ROW ...] ...           trains and scores rows with several seeds; run --help
    reproduce.py report [TABLE]                                    the tables of the results
    reproduce.py estimate [TABLE] [--gpu NAME]                     hours, memory and disk of its rows on a GPU

Among the tables are those of the papers scaled down to hours of two CPU cores; `run` is for these.

SOURCE  the model to start from, in the tables where it does (Mao's and Choi's)
DATA    text as the experiment's prepare.sh leaves it
OUT     where checkpoints, logs and translations of this model go
OPTION  of fairseq-train (--fp16, --cpu, --seed 2, ...), fairseq-eval-lm or fairseq-generate; it overrides the row's

In the environment: GPUS, those that train (default 1); UPDATE_FREQ, batches that each of them adds up for one update
(default 1, of translations 48 / GPUS), the paper's batch being divided among them; PRECISION of the training, where the
table has one (fp16, bf16 or fp32); of an evaluation, CHECKPOINT, its name in OUT, SPLITS and MODE (sliding, carried,
context-N), and of translations SUBSETS; DEVICE=gpu, with which `run` takes --cpu out of rows that are scaled down.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common.command_line import ArgumentParser, positive, run_to_the_end
from common.commands import programs_on_path
from common.files import UserError, write_whole
from common.steps import Runner
from common.tables import format_table
from papers import SCALED, TABLES, estimate
from papers.drawing import draw_table
from papers.grid import Way, plan, run_grid, steps_by_hand
from papers.ledger import COMMITTED, code_digest, read_ledger
from papers.report import DOCS, block, current, is_stale, page
from papers.rows import Places, Table

ALL = TABLES | SCALED


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    programs_on_path()
    parser = ArgumentParser(
        description=__doc__, usage=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", nargs="?", const="", metavar="TABLE", help="list all tables and rows, or one's")
    parser.add_argument("--print", action="store_true", help="print the commands, run nothing")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="TABLE ROW ...")
    options = parser.parse_args(arguments)
    if options.words[:1] == ["run"]:
        return _run_rows(options.words[1:])
    if options.words[:1] == ["report"]:
        return _report(options.words[1:])
    if options.words[:1] == ["estimate"]:
        return estimate.main(options.words[1:], TABLES)
    if options.list is not None:
        return run_to_the_end(lambda: _list(options.list))
    return run_to_the_end(lambda: _reproduce(options.words, options.print))


def _list(name: str) -> None:
    """Prints a table, or all."""
    for known, table in ALL.items() if not name else [(name, _find("TABLE", name, ALL))]:
        print(f"{known}: {table.title} (examples/{table.folder})\n\n{listing(table)}\n")


def listing(table: Table) -> str:
    """A table's rows and the paper's numbers."""
    rows = [[f"`{name}`", row.model, *row.numbers] for name, row in table.rows.items()]
    return format_table(["row", "model", *table.measures], rows)


def _find(kind: str, name: str, known: dict[str, Any]) -> Any:
    if name not in known:
        raise UserError(f"{kind} is {name}; it must be one of {', '.join(known)}")
    return known[name]


def _run_rows(arguments: list[str]) -> int:
    """Runs `reproduce.py run` with these arguments; returns the exit status."""
    words, given, scoring = _parted(arguments)
    parser = ArgumentParser(
        prog="reproduce.py run",
        description="Trains and scores rows of a table with several seeds, and adds the results to a ledger. Rows that "
        "the ledger has are skipped, and interrupted ones continue. The same command may run several times at once, on "
        "several machines that share the folders: each takes rows that no other is at work on.",
        usage="%(prog)s TABLE DATA OUT [--source SOURCE] [--rows ROW ...] [--seeds N ...] [--jobs N] [--ledger "
        "FILE] [--print | --estimate | --no-estimate] [-- OPTION ... [-- OPTION ...]]",
        epilog="After -- options of fairseq-train, which override the rows'; of them --cpu and --num-workers reach "
        "scoring, too. After a second -- options of fairseq-eval-lm or fairseq-generate, which score. Each run gets as "
        "many GPUs as the variable GPUS says (default 1).",
    )
    parser.add_argument("table", metavar="TABLE", choices=ALL, help=", ".join(ALL))
    parser.add_argument("data", type=Path, metavar="DATA", help="the folder that the experiment's prepare.sh made")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder for the runs")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="rows to run (default: all)")
    parser.add_argument(
        "--seeds", nargs="+", type=positive, default=[], metavar="N", help="seeds (default: the table's)"
    )
    parser.add_argument("--source", type=Path, metavar="SOURCE", help="the model that conversions start from")
    jobs = "runs at a time (default: as many as there are GPUs for; on a CPU as there are cores, with a thread each)"
    parser.add_argument("--jobs", type=positive, metavar="N", help=jobs)
    parser.add_argument("--ledger", type=Path, metavar="FILE", help="the ledger (default: OUT/ledger.jsonl)")
    estimates = parser.add_mutually_exclusive_group()
    estimates.add_argument("--print", action="store_true", help="print the commands of all rows and seeds, run nothing")
    estimates.add_argument("--estimate", action="store_true", help="only estimate how long it would take")
    estimates.add_argument("--no-estimate", action="store_true", help="begin without an estimate")
    options = parser.parse_args(words)

    def work() -> None:
        table = ALL[options.table]
        rows = options.rows or list(table.rows)
        for row in rows:
            _find("ROW", row, table.rows)
        places = Places(options.data, options.out, options.source)
        runs = plan(options.table, table, rows, options.seeds, places, given, scoring=scoring)
        if options.print:
            print("\n".join(dict.fromkeys(shlex.join(step.command) for run in runs for step in run.steps)))
            return
        ledger = options.ledger or options.out / "ledger.jsonl"
        estimate = "only" if options.estimate else "no" if options.no_estimate else "yes"
        run_grid(runs, options.out, ledger, Way(options.jobs, estimate))

    return run_to_the_end(work)


def _parted(words: list[str]) -> tuple[list[str], list[str], list[str]]:
    """The words before the first `--`, between that and a second one, and after it."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word == "--" and len(parts) < 3:
            parts.append([])
        else:
            parts[-1].append(word)
    first, second, third, *_ = [*parts, [], []]
    return first, second, third


def _report(arguments: list[str]) -> int:
    """Runs `reproduce.py report` with these arguments; returns the exit status."""
    parser = ArgumentParser(
        prog="reproduce.py report",
        description="Prints a table of the results of `run`. Without TABLE it makes those of the pages in docs/.",
    )
    parser.add_argument("table", nargs="?", metavar="TABLE", choices=ALL, help=", ".join(ALL))
    parser.add_argument("--ledger", type=Path, default=COMMITTED, metavar="FILE", help="(default: the one committed)")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="draw the figures of TABLE there")
    options = parser.parse_args(arguments)
    if options.figures and not options.table:
        parser.error("--figures goes with TABLE; without it the figures are those of docs/")

    def work() -> None:
        entries = read_ledger(options.ledger)
        for entry in entries:
            if is_stale(entry, ALL):
                told = "is kept" if options.table else "is left out"
                print(f"{entry.name}: its row has other commands by now; it {told}", file=sys.stderr)
            elif entry.code != code_digest():
                print(f"{entry.name}: code has changed since {entry.commit}", file=sys.stderr)
        if options.table:
            print(block(options.table, ALL[options.table], entries), end="")
            if options.figures:
                draw_table(options.table, ALL[options.table], entries, options.figures)
        else:
            for path in {DOCS / table.page: None for table in SCALED.values()}:
                write_whole(path, page(path.name, path.read_text(encoding="utf-8"), entries))
            for name, table in SCALED.items():
                draw_table(name, table, current(entries), DOCS)

    return run_to_the_end(work)


def _reproduce(words: list[str], only_print: bool) -> None:
    """Trains or scores a row by hand; nothing is done before all of it is known to be right."""
    if len(words) < 3:
        raise UserError("it takes TABLE ROW train|evaluate ...; --list shows tables and rows, --help says more")
    table, name, verb, *rest = words
    row = _find("ROW", name, _find("TABLE", table, ALL).rows)
    if verb not in ("train", "evaluate"):
        raise UserError(f"after ROW comes {verb}; it must be train or evaluate")
    names = [*(["SOURCE"] if row.recipe.sources and verb == "train" else []), "DATA", "OUT"]
    folders, options = rest[: len(names)], rest[len(names) :]
    if len(folders) < len(names) or any(folder.startswith("-") for folder in folders):
        raise UserError(f"{table} {name} {verb} takes {' '.join(names)} [OPTION ...]")
    *source, data, out = map(Path, folders)
    places = Places(data, out, *source)
    # --print needs no files: only a call that works checks them.
    steps = steps_by_hand(verb, f"{table} {name}", row, places, options, checked=not only_print)
    if only_print:
        print("\n".join(shlex.join(step.command) for step in steps))
        return
    Runner(1, sys.stdout, {}, follows=True).run(steps)
    for step in steps if verb == "evaluate" else ():
        print(f"{out}:", *(f"{score}: {value:,.2f}" for score, value in step.finished_result().items()))


if __name__ == "__main__":
    sys.exit(main())
