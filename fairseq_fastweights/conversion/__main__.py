"""`python -m fairseq_fastweights.conversion`: models from Hugging Face folders for fairseq, and back."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from fairseq_fastweights.conversion.huggingface import from_huggingface
from fairseq_fastweights.conversion.tokenizer import read_tokenizer
from fairseq_fastweights.conversion.weight_files import read_json


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; 0, or 2 after a message about what is wrong with the input."""
    parser = argparse.ArgumentParser(prog="python -m fairseq_fastweights.conversion", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    reading = commands.add_parser("from-huggingface", help="make a folder for fairseq of a GPT-2 or GPT-NeoX (Pythia)")
    writing = commands.add_parser("to-huggingface", help="make a Hugging Face folder of a language model of fairseq's")
    sources = (
        (reading, "a folder: config.json, weights and tokenizer"),
        (writing, "a checkpoint, or a folder with model.pt, checkpoint_best.pt or checkpoint_last.pt"),
    )
    for command, what in sources:
        command.add_argument("source", type=Path, metavar="SOURCE", help=what)
        command.add_argument("target", type=Path, metavar="TARGET", help="the new folder; it must not exist")
    writing.add_argument("--checkpoint", type=Path, help="the model, in the place of that in SOURCE, trained further")
    writing.add_argument(
        "--data",
        type=Path,
        help="the folder with the model's dict.txt (default: the checkpoint's, or else that of its training's data)",
    )
    writing.add_argument(
        "--tokenizer",
        help="the folder with encoder.json and vocab.bpe of the byte-level BPE whose numbers are in dict.txt, or "
        "'words' if words are (default: looked for beside dict.txt and the checkpoint)",
    )
    options = parser.parse_args(arguments)
    try:
        if options.command == "from-huggingface":
            print(_from(options.source, options.target))
        else:
            _to(options)
    except (ValueError, OSError) as error:
        print(f"{parser.prog} {options.command}: error: {error}", file=sys.stderr)
        return 2
    return 0


def _from(source: Path, target: Path) -> str:
    """Runs `from-huggingface`; what there is to say about the files."""
    tokenizer: str | None = f"--bpe byte_level --byte-level-folder {target}"
    if _is_ours(source / "config.json"):
        from_exported = _with_transformers("exported").from_exported
        tokenizer = tokenizer if from_exported(source, target) else None
    else:
        family = from_huggingface(source, target)
        if read_tokenizer(source).is_plain(family.end_of_text):
            tokenizer = f"--bpe gpt2 --gpt2-encoder-json {target}/encoder.json --gpt2-vocab-bpe {target}/vocab.bpe"
    return (
        f"{target}/model.pt is the model, for --path, --restore-file or --finetune-from-model;\n"
        f"{target}/dict.txt its dictionary, for fairseq-preprocess --srcdict"
    ) + (f";\nits tokenizer is {tokenizer}" if tokenizer else "")


def _is_ours(config: Path) -> bool:
    """Whether a config.json is of a model that `to-huggingface` made, or of its class."""
    return config.is_file() and read_json(config).get("model_type") == "fast_weight"


def _to(options: argparse.Namespace) -> None:
    """Runs `to-huggingface`."""
    to_huggingface = _with_transformers("export").to_huggingface
    importlib.import_module("transformers").utils.logging.disable_progress_bar()
    to_huggingface(
        options.source,
        options.target,
        checkpoint=options.checkpoint,
        data=options.data,
        tokenizer=options.tokenizer,
    )


def _with_transformers(module: str) -> Any:
    """A module of this package that needs `transformers`, which the others do not."""
    try:
        return importlib.import_module(f"fairseq_fastweights.conversion.{module}")
    except ImportError as error:
        raise ValueError(f"this needs the package transformers: pip install transformers ({error})") from None


if __name__ == "__main__":
    sys.exit(main())
