"""Cuts words into pieces with sentencepiece, whose package has no commands for it.

    python examples/demo_translation/pieces.py train MODEL FILE... [--pieces N]
    python examples/demo_translation/pieces.py encode MODEL FOLDER FILE...

`train` learns from all FILEs together and writes MODEL. `encode` writes each FILE, in pieces that are separated by
spaces, into FOLDER under the same name.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path

import sentencepiece

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import ArgumentParser
from common.files import read_lines, refuse_to_overwrite, write_whole

PIECES = 200
"""By default: the words of small numbers and of tens are pieces then, but hardly any German compound is."""


def main(arguments: list[str] | None = None) -> int:
    """Does what the command line says; returns the exit status."""
    parser = ArgumentParser(description="Cuts words into pieces with sentencepiece.")
    actions = parser.add_subparsers(dest="action", required=True)
    learning = actions.add_parser("train", help="learn pieces from text")
    learning.add_argument("model", type=Path, metavar="MODEL", help="the file to write")
    learning.add_argument("files", type=Path, nargs="+", metavar="FILE", help="text, a sentence to a line")
    learning.add_argument(
        "--pieces", type=int, default=PIECES, metavar="N", help=f"how many pieces (default: {PIECES})"
    )
    encoding = actions.add_parser("encode", help="cut text into pieces")
    encoding.add_argument("model", type=Path, metavar="MODEL", help="what `train` wrote")
    encoding.add_argument("folder", type=Path, metavar="FOLDER", help="where the text in pieces goes")
    encoding.add_argument("files", type=Path, nargs="+", metavar="FILE", help="text, a sentence to a line")
    options = parser.parse_args(arguments)
    try:
        if options.action == "train":
            train(options.files, options.model, options.pieces)
        else:
            encode(options.model, options.files, options.folder)
    except (ValueError, OSError, RuntimeError) as error:  # sentencepiece's own are RuntimeErrors
        print(f"pieces.py: {error}", file=sys.stderr)
        return 1
    return 0


def train(files: Sequence[Path], model: Path, pieces: int) -> None:
    """Learns pieces, by byte pair encoding, from several texts together."""
    refuse_to_overwrite(model)
    lines = [line for file in files for line, _ in read_lines(file)]
    result = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=result,
        vocab_size=pieces,
        model_type="bpe",
        character_coverage=1.0,
        num_threads=1,
        minloglevel=2,
    )
    write_whole(model, result.getvalue())


def encode(model: Path, files: Sequence[Path], folder: Path) -> None:
    """Cuts texts into a model's pieces."""
    if not model.is_file():
        raise FileNotFoundError(f"there is no model {model}")
    names = [file.name for file in files]
    if len(set(names)) < len(names):
        raise ValueError(f"two files have the same name, of {', '.join(names)}; encode them into different folders")
    refuse_to_overwrite(*(folder / name for name in names))
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        lines = [" ".join(processor.encode(line, out_type=str)) for line, _ in read_lines(file)]
        write_whole(folder / file.name, "".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
