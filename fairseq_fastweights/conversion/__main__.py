"""`python -m fairseq_fastweights.conversion`: models from Hugging Face folders for fairseq, and back."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fairseq_fastweights.conversion.huggingface import from_huggingface, to_huggingface
from fairseq_fastweights.conversion.tokenizer import read_tokenizer


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; 0, or 2 after a message about what is wrong with the input."""
    parser = argparse.ArgumentParser(prog="python -m fairseq_fastweights.conversion", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    reading = commands.add_parser("from-huggingface", help="make a folder for fairseq of a GPT-2 or GPT-NeoX (Pythia)")
    writing = commands.add_parser("to-huggingface", help="make a Hugging Face folder of such a folder")
    for command, made_by in ((reading, "config.json, weights and tokenizer"), (writing, "what from-huggingface made")):
        command.add_argument("source", type=Path, metavar="SOURCE", help=f"a folder: {made_by}")
        command.add_argument("target", type=Path, metavar="TARGET", help="the new folder; it must not exist")
    writing.add_argument("--checkpoint", type=Path, help="of the model, trained further; SOURCE's model.pt otherwise")
    options = parser.parse_args(arguments)
    try:
        if options.command == "from-huggingface":
            family = from_huggingface(options.source, options.target)
            plain = read_tokenizer(options.source).is_plain(family.end_of_text)
            print(_how_to_use(options.target, plain))
        else:
            to_huggingface(options.source, options.target, options.checkpoint)
    except (ValueError, OSError) as error:
        print(f"{parser.prog} {options.command}: error: {error}", file=sys.stderr)
        return 2
    return 0


def _how_to_use(target: Path, plain: bool) -> str:
    tokenizer = f"--bpe byte_level --byte-level-folder {target}"
    if plain:
        tokenizer = f"--bpe gpt2 --gpt2-encoder-json {target}/encoder.json --gpt2-vocab-bpe {target}/vocab.bpe"
    return (
        f"{target}/model.pt is the model, for --path, --restore-file or --finetune-from-model;\n"
        f"{target}/dict.txt its dictionary, for fairseq-preprocess --srcdict;\n"
        f"its tokenizer is {tokenizer}"
    )


if __name__ == "__main__":
    sys.exit(main())
