#!/usr/bin/env python
"""Makes a task of lm-evaluation-harness, `last_words`, of text in WikiText's format. See prepare.sh.

    last_words.py TEXT OUT [--passages N]

As in LAMBADA (Paperno et al. 2016), a model reads a passage without its last word, and is right if each subword of that
word is the most probable one. A passage is a paragraph up to the first full stop that has at least 40 words before it,
the last of them of letters alone. In LAMBADA people have chosen passages whose last word only the whole tells; here
nobody has.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import ArgumentParser, positive, run_to_the_end
from common.files import UserError, read_lines, write_whole

WORDS = 40
TASK = """\
task: last_words
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
output_type: loglikelihood
test_split: test
doc_to_text: "{{{{text.split(' ')[:-1]|join(' ')}}}}"
doc_to_target: "{{{{' '+text.split(' ')[-1]}}}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = ArgumentParser(description="Makes a task of text: which word is the last?")
    parser.add_argument("text", type=Path, metavar="TEXT", help="a paragraph a line, with words one space apart")
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder, for --include_path")
    parser.add_argument("--passages", type=positive, default=200, metavar="N", help="the first so many (default: 200)")
    options = parser.parse_args(arguments)
    return run_to_the_end(lambda: write_task(options.text, options.out, options.passages))


def write_task(text: Path, out: Path, most: int) -> None:
    """Raises UserError if the text has no passage."""
    found = list(islice(passages(text), most))
    if not found:
        raise UserError(f"{text} has no paragraph with a sentence that ends after {WORDS} words")
    out.mkdir(parents=True, exist_ok=True)
    file = out.resolve() / "last_words.jsonl"
    write_whole(file, "".join(json.dumps({"text": passage}) + "\n" for passage in found))
    write_whole(out / "last_words.yaml", TASK.format(file=json.dumps(str(file))))


def passages(path: Path) -> Iterator[str]:
    """The lines of a file. Raises UserError if it cannot be read."""
    for line, _ in read_lines(path):
        words = line.split()
        # The place of the full stop; the word before it is to be guessed.
        ends = (at for at in range(WORDS, len(words)) if words[at] == "." and words[at - 1].isalpha())
        if (end := next(ends, None)) is not None:
            yield " ".join(words[:end])


if __name__ == "__main__":
    sys.exit(main())
