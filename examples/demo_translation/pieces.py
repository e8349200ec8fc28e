"""Cuts words into pieces with sentencepiece, whose package has no commands for it.

    python examples/demo_translation/pieces.py TEXT OUT [--pieces N]

TEXT has {train,valid,test}.{en,de}. OUT gets the same files in pieces that are separated by spaces, learned from both
languages of the training text together, and their model, subwords.model.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import ArgumentParser, positive, run_to_the_end
from common.files import read_text, refuse_to_overwrite, write_whole
from common.sentencepieces import SentencePieces

from demo_translation.number_text import LANGUAGES, SPLITS

PIECES = 200
"""By default: the words of small numbers and of tens are pieces then, but hardly any German compound is."""


def main(arguments: list[str] | None = None) -> int:
    """Learns pieces and cuts the text; returns the exit status."""
    parser = ArgumentParser(description="Cuts words into pieces with sentencepiece.")
    parser.add_argument("text", type=Path, metavar="TEXT", help="a folder of text, a sentence to a line")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder for the model and the text in pieces")
    help = f"how many pieces (default: {PIECES})"
    parser.add_argument("--pieces", type=positive, default=PIECES, metavar="N", help=help)
    options = parser.parse_args(arguments)
    return run_to_the_end(lambda: cut(options.text, options.out, options.pieces))


def cut(text: Path, out: Path, number: int) -> None:
    """Raises UserError if there are not so many pieces, and FileExistsError for a file that is there already."""
    names = [f"{split}.{language}" for split in SPLITS for language in LANGUAGES]
    refuse_to_overwrite(*(out / name for name in (*names, SentencePieces.file)))
    lines = {name: read_text(text / name) for name in names}
    learned = [line for language in LANGUAGES for line in lines[f"train.{language}"]]
    settings = {"character_coverage": 1.0, "byte_fallback": False, "normalization_rule_name": "nmt_nfkc"}
    model = SentencePieces.learn(learned, number, num_threads=1, **settings)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / SentencePieces.file, model)
    for name in names:
        write_whole(out / name, "".join(f"{line}\n" for line in SentencePieces(model).encode(lines[name])))


if __name__ == "__main__":
    sys.exit(main())
