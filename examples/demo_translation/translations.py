"""Puts the translations that `fairseq-generate` printed into the order of the source text.

    python examples/demo_translation/translations.py GENERATED SOURCE OUT

GENERATED is what fairseq-generate wrote, which translates sentences of about the same length together; SOURCE is the
text that it translated. OUT gets the best translation of each of SOURCE's lines.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import files
from common.command_line import ArgumentParser
from common.files import refuse_to_overwrite, write_whole

_BEST = re.compile(r"^D-(\d+)\t\S+\t(.*)$", re.MULTILINE)


def main(arguments: list[str] | None = None) -> int:
    """Writes the translations; returns the exit status."""
    parser = ArgumentParser(description="Puts the output of fairseq-generate into the order of its source.")
    parser.add_argument("generated", type=Path, metavar="GENERATED", help="what fairseq-generate wrote")
    parser.add_argument("source", type=Path, metavar="SOURCE", help="the text that was translated")
    parser.add_argument("out", type=Path, metavar="OUT", help="the file to write")
    options = parser.parse_args(arguments)
    try:
        refuse_to_overwrite(options.out)
        lines = len(read_lines(options.source))
        try:
            translations = order("\n".join(read_lines(options.generated)), lines)
        except ValueError as error:
            raise ValueError(f"{options.generated} does not fit {options.source}: {error}") from None
        write_whole(options.out, "".join(f"{line}\n" for line in translations))
    except (ValueError, OSError) as error:
        print(f"translations.py: {error}", file=sys.stderr)
        return 1
    return 0


def order(generated: str, lines: int) -> list[str]:
    """The translations of lines 0, 1, 2 and so on. Raises ValueError if there is not just one for each line."""
    found: dict[int, str] = {}
    for number, text in _BEST.findall(generated):
        if int(number) in found:
            raise ValueError(f"line {int(number) + 1} has two translations; generate with --nbest 1")
        found[int(number)] = text
    missing = [number for number in range(lines) if number not in found]
    if missing:
        raise ValueError(
            f"{len(missing)} of {lines} lines have no translation, line {missing[0] + 1} the first of them"
        )
    if len(found) > lines:
        raise ValueError(f"there are {len(found)} translations of {lines} lines")
    return [found[number] for number in range(lines)]


def read_lines(path: Path) -> list[str]:
    """The lines of a text, the last one ended or not."""
    return [text for text, _ in files.read_lines(path)]


if __name__ == "__main__":
    sys.exit(main())
