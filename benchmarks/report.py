"""Writes docs/performance.md from the results in benchmarks/results, and from nothing else.

    python benchmarks/report.py [--check]

--check writes nothing and fails where the page is not what the results say.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import (
    ROOT,
    kernel_tables,
    length_tables,
    next_token_tables,
    records,
    targets,
    training_tables,
    translation_tables,
)
from harness.tables import count

Record = dict[str, Any]

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"

_SECTIONS: dict[str, tuple[str, str, Callable[[Record], str]]] = {
    "kernels": (
        "The rules",
        "Medians of each rule, and how many times as long the others take for the same inputs; below 1, they are "
        "faster. SDPA is causal softmax attention of the same batch, time and heads with head dimension V. "
        "`causal_product`, the kernel of pytorch-fast-transformers 0.4.0 compiled with "
        "`-O3 -march=native -ffast-math`, is the sum rule alone. Every contestant has its own layout, contiguous; "
        "forward+backward makes the gradients of all inputs, gates included. The limit is the larger of two times: "
        "every input, output and gradient moved once over the bandwidth of a copy of that many bytes, and the "
        "recurrence's operations over the rate of a matrix product. On a CPU what calls free is kept for those after "
        "them, so that none waits for the system to hand out pages.",
        kernel_tables.render,
    ),
    "generation": (
        "The next token",
        "Figure 1 of Mao (2022), with fairseq's Transformer for attention: a forward pass for one more token of every "
        "row, with fairseq's incremental state and the output layer. Generation rolls forward, in a stretch around "
        "each length: the models take turns of a few tokens, each going on where it stopped; the first token of a "
        "turn is not timed. Expected is the ratio if the Transformer's tokens took longer than after the fewest tokens "
        "by no more than the time in which its cache is copied and the copy read, timed beside them, and the others' "
        "no longer. The Transformer's cache, which grows, leaves the others less of the processor's; so whether their "
        "tokens take as long at every length is measured without it, a model's lengths taking turns. The peak is the "
        "most memory that the state and the call's tensors take, beside the weights.",
        next_token_tables.render,
    ),
    "translation": (
        "A translated token",
        "Models of the size of fairseq's `transformer_iwslt_de_en`: fairseq's own for attention, and fast weights in "
        "place of all of it, with feature maps of 128 (`elu`), 512 (`dpfp-2`) and 256 (`favor-128`) features a head. A "
        "token is what fairseq's `SequenceGenerator` does for one more of every hypothesis: they change places, the "
        "decoder reads the last of each, the search takes the best of what may follow. A hypothesis' state is its own "
        "and its share of what its sentence has in common; beside it the encoder's output is kept and put in order. "
        "The peak is the most memory that all of these and the token's tensors take, beside the weights.",
        translation_tables.render,
    ),
    "training_length": (
        "Training time against length",
        "Forward and backward of a call with the same number of tokens, cut into longer rows.",
        length_tables.render,
    ),
    "training": (
        "Training end to end",
        "`fairseq-train` with the paper's small language model; softmax is the same model with fairseq's own "
        "attention.",
        training_tables.render,
    ),
}


def find_records(folder: Path) -> list[tuple[Path, Record]]:
    """The results in a folder, by program, device and date. A file is a record, or an object that holds some."""
    known = []
    for path in sorted(folder.glob("*.json")):
        content = records.read(path)
        for record in (content, *content.values()):
            if isinstance(record, dict) and record.get("program") in _SECTIONS:
                known.append((path, record))
    order = list(_SECTIONS)
    return sorted(known, key=lambda item: (order.index(item[1]["program"]), item[1]["device"], item[1]["date"]))


def render(results: Sequence[tuple[Path, Record]], page: Path) -> str:
    """The page, as it is at the path `page`: its links start there."""
    parts = [_HEAD, targets.render(targets.evaluate([record for _, record in results if records.is_current(record)]))]
    for path, record in results:
        title, text, table = _SECTIONS[record["program"]]
        where = "GPU" if record["device"] == "cuda" else "CPU"
        link = os.path.relpath(path, page.parent)
        if not records.is_current(record):
            was = f"[what it measured on {record['date'][:10]}]({link}) says something else"
            parts.append(f"## {title}, {where}\n\nNot measured as {record['program']}.py measures now; {was}.\n")
            continue
        parts += [f"## {title}, {where}\n", f"{text}\n", f"{_machine(record)} ([JSON]({link}))\n", table(record)]
        figure = path.with_suffix(".png")
        if figure.exists():
            parts.append(f"![{title}, {where}]({os.path.relpath(figure, page.parent)})\n")
    return "\n".join(parts)


_HEAD = """# Performance

<!-- Written by benchmarks/report.py from benchmarks/results: change these, not this page. -->

Everything here compares things within one run: contestants take turns (A B C A B C ...), numbers are medians, and what
counts is ratios. Absolute times are those of the machine named beside them.

```sh
python benchmarks/build_causal_product.py   # optional: the peer of the sum rule, a minute
python benchmarks/all_cpu.py                # all results of this page on a CPU, within 17 minutes on an idle machine
python benchmarks/kernels.py --device cuda --out benchmarks/results/kernels_cuda.json    # on a GPU
python benchmarks/training.py --device cuda --precision bf16 --out benchmarks/results/training_cuda.json
python benchmarks/report.py                 # this page
```

## Targets

What the project set out to reach. Of several cases the worst counts.
"""


def _machine(record: Record) -> str:
    machine, versions = record["machine"], record["versions"]
    parts = [
        *([machine["gpu"]] if "gpu" in machine else []),
        f"{machine['cpu']} ({machine['capability']})",
        f"{count(record['threads'], 'thread')} on {count(machine['cores'], 'core')}",
        f"torch {versions['torch']}",
        f"Python {versions['python']}",
        record["date"][:10],
    ]
    if "load before" in machine:
        parts.append(f"load before the run {machine['load before']:g}")
    return f"Measured on: {', '.join(parts)}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="default: benchmarks/results")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="default: docs/performance.md")
    parser.add_argument("--check", action="store_true", help="fail where the page is out of date")
    options = parser.parse_args()
    page = options.page.resolve()
    results = find_records(options.results.resolve())
    if not results:
        missing = "holds no results" if options.results.is_dir() else "is no folder"
        parser.error(f"--results is {options.results}, which {missing}; it must be where benchmarks/*.py wrote theirs")
    text = render(results, page)
    if not options.check:
        page.write_text(text)
    elif not page.exists() or page.read_text() != text:
        sys.exit(f"{options.page} is not what {options.results} says; python benchmarks/report.py writes it")


if __name__ == "__main__":
    main()
