"""`python -m fairseq_fastweights.conversion`: models from Hugging Face folders for fairseq, and back."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fairseq_fastweights.conversion import hub
from fairseq_fastweights.conversion.families import FAMILIES
from fairseq_fastweights.conversion.folders import check_target
from fairseq_fastweights.conversion.huggingface import from_huggingface, to_huggingface


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; 0, or 2 after a message about what is wrong with the input."""
    parser = argparse.ArgumentParser(prog="python -m fairseq_fastweights.conversion", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    reading = commands.add_parser("from-huggingface", help=f"make a folder for fairseq of a {', '.join(FAMILIES)}")
    writing = commands.add_parser("to-huggingface", help="make a Hugging Face folder of such a folder")
    reading.add_argument(
        "source",
        metavar="SOURCE",
        help="a folder with config.json, weights and tokenizer; or a model's name on the hub, as OWNER/NAME",
    )
    reading.add_argument("--revision", help="of a model on the hub: a branch, tag or commit (default: main)")
    reading.add_argument("--dry-run", action="store_true", help="say what would be fetched, and how large it is")
    writing.add_argument("source", type=Path, metavar="SOURCE", help="a folder: what from-huggingface made")
    for command in (reading, writing):
        command.add_argument("target", type=Path, metavar="TARGET", help="the new folder; it must not exist")
    writing.add_argument("--checkpoint", type=Path, help="of the model, trained further; SOURCE's model.pt otherwise")
    options = parser.parse_args(arguments)
    try:
        if options.command == "from-huggingface":
            _read(options)
        else:
            to_huggingface(options.source, options.target, options.checkpoint)
    except (ValueError, OSError) as error:
        print(f"{parser.prog} {options.command}: error: {error}", file=sys.stderr)
        return 2
    return 0


def _read(options: argparse.Namespace) -> None:
    """from-huggingface."""
    check_target(options.target)
    named = hub.is_name(options.source)
    if not named and (options.dry_run or options.revision is not None):
        option = "--dry-run" if options.dry_run else "--revision"
        raise ValueError(f"{option} is given and SOURCE is {options.source}; with it SOURCE must be a name on the hub")
    if options.dry_run:
        print(hub.list_files(options.source, options.revision))
        return
    source = hub.fetch(options.source, options.revision) if named else Path(options.source)
    print(_how_to_use(options.target, from_huggingface(source, options.target)))


def _how_to_use(target: Path, tokenizer: str) -> str:
    return (
        f"{target}/model.pt is the model, for --path, --restore-file or --finetune-from-model;\n"
        f"{target}/dict.txt its dictionary, for fairseq-preprocess --srcdict;\n"
        f"its tokenizer is {tokenizer}\n"
        f"{target}/options.txt has the options of fairseq-train for its shape: $(cat {target}/options.txt)"
    )


if __name__ == "__main__":
    sys.exit(main())
