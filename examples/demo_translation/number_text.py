"""Makes parallel text: numbers in English and in German words, in three splits that share no number.

    python examples/demo_translation/number_text.py FOLDER [--train N] [--valid N] [--test N]

FOLDER gets train.en, train.de, valid.en and so on. The same call gives the same text everywhere.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from num2words import num2words

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import ArgumentParser, run_to_the_end
from common.files import SPLITS, UserError, refuse_to_overwrite, write_whole

LANGUAGES = ("en", "de")
DIGITS = 12
"""Of the longest number; each number of digits is as likely as any other, as long as there are new numbers of it."""
SIZES = {"train": 20_000, "valid": 500, "test": 1_000}
MOST = 1_000_000
"""Numbers in all: far more than are needed, far fewer than there are."""
SEED = 1


def main(arguments: list[str] | None = None) -> int:
    """Writes the text; returns the exit status."""
    parser = ArgumentParser(description="Numbers in English and German words, as parallel text.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the text goes")
    for split in SPLITS:
        help = f"numbers in {split} (default: {SIZES[split]:,})"
        parser.add_argument(f"--{split}", type=int, default=SIZES[split], metavar="N", help=help)
    options = parser.parse_args(arguments)
    sizes = {split: getattr(options, split) for split in SPLITS}
    return run_to_the_end(lambda: write_text(split_numbers(sizes), options.folder))


def split_numbers(sizes: dict[str, int], seed: int = SEED) -> dict[str, list[int]]:
    """Draws numbers from 1 to 10^12 - 1, each at most once.

    `sizes`: how many numbers, for each of `SPLITS`. `seed`: of the draw. Raises UserError if a size is not positive,
    or they are more than `MOST` together.
    """
    for split, size in sizes.items():
        if size < 1:
            raise UserError(f"--{split} is {size}; it must be at least 1")
    total = sum(sizes.values())
    if total > MOST:
        raise UserError(f"--{', --'.join(sizes)} are {total:,} together; they must be {MOST:,} at most")
    draw = random.Random(seed)
    drawn: dict[int, None] = {}  # as a set, but in order
    while len(drawn) < total:
        power = 10 ** draw.randrange(DIGITS)
        drawn[draw.randrange(power, 10 * power)] = None
    numbers = list(drawn)
    draw.shuffle(numbers)  # early and late draws differ: the short numbers are used up soon
    splits = {}
    for split, size in sizes.items():
        splits[split], numbers = numbers[:size], numbers[size:]
    return splits


def write_text(splits: dict[str, list[int]], folder: Path) -> None:
    """Writes a file for each split and language, a number to a line. Raises FileExistsError if one is there already;
    nothing is written then.
    """
    paths = {(split, language): folder / f"{split}.{language}" for split in splits for language in LANGUAGES}
    refuse_to_overwrite(*paths.values())
    folder.mkdir(parents=True, exist_ok=True)
    for (split, language), path in paths.items():
        write_whole(path, "".join(f"{num2words(number, lang=language)}\n" for number in splits[split]))


if __name__ == "__main__":
    sys.exit(main())
