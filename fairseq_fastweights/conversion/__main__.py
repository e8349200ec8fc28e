"""Converts models from Hugging Face folders for fairseq, and back: `python -m fairseq_fastweights.conversion`."""

from __future__ import annotations

import importlib
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fairseq_fastweights.command_line import fail
from fairseq_fastweights.conversion import hub
from fairseq_fastweights.conversion.families.table import FAMILIES, SERVED
from fairseq_fastweights.conversion.files.folders import check_target
from fairseq_fastweights.conversion.files.weight_files import read_json
from fairseq_fastweights.conversion.from_huggingface import from_huggingface
from fairseq_fastweights.conversion.gguf import SUFFIX, unpacked
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.suggestions import ArgumentParser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns the exit status, 2 after a message about an error in the input."""
    parser = ArgumentParser(prog="python -m fairseq_fastweights.conversion", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    reading = commands.add_parser("from-huggingface", help=f"convert a model for fairseq: {', '.join(FAMILIES)}")
    writing = commands.add_parser("to-huggingface", help="convert a language model of fairseq")
    reading.add_argument(
        "source",
        metavar="SOURCE",
        help="a folder with config.json, weights and tokenizer; a GGUF file; or a name on the hub, as OWNER/NAME",
    )
    reading.add_argument("--revision", help="branch, tag or commit of a model on the hub (default: main)")
    reading.add_argument(
        "--end-of-text",
        metavar="TOKEN",
        help="the added token of the tokenizer that becomes fairseq's </s>, as <|im_end|> (default: the first "
        "eos_token_id of config.json, else the tokenizer's)",
    )
    reading.add_argument("--dry-run", action="store_true", help="list the files that would be fetched, and their sizes")
    writing.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="a checkpoint, or a folder with model.pt, checkpoint_best.pt or checkpoint_last.pt",
    )
    for command in (reading, writing):
        command.add_argument("target", type=Path, metavar="TARGET", help="the new folder; it must not exist")
    writing.add_argument("--checkpoint", type=Path, help="another checkpoint of the model in SOURCE, trained further")
    writing.add_argument(
        "--data",
        type=Path,
        help="the folder with dict.txt (default: the checkpoint's folder, then the folder of its training data)",
    )
    writing.add_argument(
        "--tokenizer",
        help="the folder with the tokenizer whose token ids are in dict.txt: tokenizer.json and tokenizer_words.json, "
        "or encoder.json and vocab.bpe; or 'words' if words are (default: searched beside dict.txt and the checkpoint)",
    )
    writing.add_argument(
        "--as",
        dest="model_type",
        choices=SERVED,
        metavar="CLASS",
        help=f"a class that transformers has itself, for programs that do not know this package: {', '.join(SERVED)}; "
        "an error if it differs from the model",
    )
    options = vars(parser.parse_args(arguments))
    command = options.pop("command")
    try:
        print(_from(**options) if command == "from-huggingface" else _to(**options))
    except (InvalidInput, OSError) as error:
        return fail(f"{parser.prog} {command}", error)
    return 0


def _from(source: str, target: Path, revision: str | None, end_of_text: str | None, dry_run: bool) -> str:
    """Runs `from-huggingface`; returns lines to print."""
    check_target(target)
    path = Path(source)  # a folder comes before a model on the hub of the same name
    on_hub = not path.exists() and hub.is_name(source)
    if not on_hub and (dry_run or revision is not None):
        option = "--dry-run" if dry_run else "--revision"
        raise InvalidInput(f"{option} is given and SOURCE is {source}; with it SOURCE must be a name on the hub")
    if dry_run:
        return str(hub.list_files(source, revision))
    path = hub.fetch(source, revision) if on_hub else path
    # A GGUF file becomes a temporary folder; all else is a folder already.
    with unpacked(path) if path.suffix == SUFFIX and not path.is_dir() else nullcontext(path) as folder:
        config = folder / "config.json"
        # The project's own class says its options itself, and keeps fairseq's dictionary.
        if config.is_file() and read_json(config).get("model_type") == "fast_weight":
            if end_of_text is not None:
                raise InvalidInput(
                    f"--end-of-text is {end_of_text!r}, but {folder} is a model of fairseq's, which has </s>"
                )
            tokenizer = _with_transformers("from_project_class").from_project_class(folder, target)
            options = None
        else:
            tokenizer = from_huggingface(folder, target, end_of_text=end_of_text)
            options = f"{target}/options.txt has fairseq-train's options for its shape: $(cat {target}/options.txt)"
    lines = [
        f"{target}/model.pt is the model, for --path, --restore-file or --finetune-from-model;",
        f"{target}/dict.txt its dictionary, for fairseq-preprocess --srcdict",
        tokenizer and f"its tokenizer is {tokenizer}",
        options,
    ]
    return "\n".join(filter(None, lines))


def _to(source: Path, target: Path, **options: Any) -> str:
    """Runs `to-huggingface`; returns a line to print."""
    convert = _with_transformers("to_huggingface").to_huggingface
    importlib.import_module("transformers").utils.logging.disable_progress_bar()
    convert(source, target, **options)
    return f"{target} is the model as a folder for transformers: AutoModelForCausalLM.from_pretrained"


def _with_transformers(module: str) -> Any:
    """Imports a module of this package that needs `transformers`."""
    try:
        return importlib.import_module(f"fairseq_fastweights.conversion.{module}")
    except ImportError as error:
        raise InvalidInput(f"this needs the package transformers: pip install transformers ({error})") from None


if __name__ == "__main__":
    sys.exit(main())
