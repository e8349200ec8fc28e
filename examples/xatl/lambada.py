#!/usr/bin/env python
"""LAMBADA: how often a model says the last word of a passage, and its perplexity.

    lambada.py SOURCE OUT FILE [--checkpoint NAME] [--batch N] [--cpu]

SOURCE is the converted Pythia whose subwords the model has, OUT the folder of the model. FILE has a passage on each
line, an object of which "text" is the passage, as lambada_test.jsonl. The result is printed and written to
OUT/lambada.json; of another checkpoint than checkpoint_best.pt, as checkpoint_last.pt, to
OUT/lambada.checkpoint_last.json. One that is there already stands for a test that is done, unless the checkpoint is
newer or FILE is another.

As in the lm-eval harness: the passage up to its last space is the context, with nothing before it. A word counts as
said if each of its subwords is the most probable one after those before it; the perplexity is that of the last words.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import positive
from common.files import write_whole

ROOT = Path(__file__).resolve().parents[2]
BEST = "checkpoint_best.pt"


class LambadaError(ValueError):
    """What is wrong with the input; the message is for the person at the terminal."""


@dataclass(frozen=True)
class Passage:
    """Numbers of a passage's subwords, of which the last `last` are its last word."""

    tokens: list[int]
    last: int


def main(arguments: list[str] | None = None) -> int:
    """Tests a model; returns the exit status."""
    parser = argparse.ArgumentParser(description="Tests a model on LAMBADA.")
    parser.add_argument("source", type=Path, metavar="SOURCE", help="the converted model's folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder of the model that is tested")
    parser.add_argument("file", type=Path, metavar="FILE", help="has a passage a line, as JSON")
    parser.add_argument("--checkpoint", default=BEST, metavar="NAME", help="in OUT; default: %(default)s")
    parser.add_argument(
        "--batch", type=positive, default=16, metavar="N", help="passages at a time; default: %(default)s"
    )
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")
    options = parser.parse_args(arguments)
    try:
        done = options.out / result_name(options.checkpoint)
        result = read_result(done, options.out / options.checkpoint, options.file)
        if result is None:
            device = torch.device("cuda" if torch.cuda.is_available() and not options.cpu else "cpu")
            texts = read_texts(options.file)
            model, dictionary, encode = load(options.source, options.out / options.checkpoint)
            passages = [encode_passage(text, encode, dictionary) for text in texts]
            result = score(model.to(device), passages, dictionary.pad(), options.batch)
            made_from = {"file": str(options.file), "checkpoint": options.checkpoint}
            write_whole(done, json.dumps({**made_from, **result}) + "\n")
    except (LambadaError, OSError) as error:
        print(f"lambada.py: {error}", file=sys.stderr)
        return 1
    print(
        f"{options.out}: LAMBADA, {result['passages']:,} passages: accuracy {100 * result['accuracy']:.2f} %, "
        f"perplexity {result['perplexity']:.2f}"
    )
    return 0


def result_name(checkpoint: str) -> str:
    """What the result for a checkpoint is called. Raises LambadaError if that is not named as a file in OUT."""
    if Path(checkpoint).name != checkpoint:
        raise LambadaError(f"--checkpoint is {checkpoint}; it must be the name of a file in OUT")
    return "lambada.json" if checkpoint == BEST else f"lambada.{checkpoint.removesuffix('.pt')}.json"


def read_result(done: Path, checkpoint: Path, file: Path) -> dict[str, Any] | None:
    """The result in `done`, if it is that of this checkpoint as it is now and of this file."""
    if not done.exists() or (checkpoint.exists() and checkpoint.stat().st_mtime_ns > done.stat().st_mtime_ns):
        return None
    result = json.loads(done.read_text())
    return result if (result["file"], result["checkpoint"]) == (str(file), checkpoint.name) else None


def read_texts(file: Path) -> list[str]:
    """The passages, each with a last word. Raises LambadaError naming the line that has none."""
    texts = []
    with file.open(encoding="utf-8", newline="\n") as file_lines:
        lines = list(file_lines)
    for number, line in enumerate(lines, 1):
        try:
            text = json.loads(line)["text"].rstrip()
        except (ValueError, KeyError, TypeError, AttributeError):
            text = ""
        if " " not in text.lstrip():
            raise LambadaError(f"{file}: line {number} must be a JSON object whose text is a passage of several words")
        texts.append(text)
    if not texts:
        raise LambadaError(f"{file} is empty")
    return texts


def load(source: Path, checkpoint: Path) -> tuple[Any, Any, Any]:
    """A model, its dictionary, and what turns text into its words. Raises LambadaError if one of them is not there."""
    for path, meaning in ((source / "dict.txt", "SOURCE must be a converted model"), (checkpoint, "OUT must have it")):
        if not path.is_file():
            raise LambadaError(f"there is no {path}; {meaning}")
    sys.path.insert(0, str(ROOT))
    from fairseq import checkpoint_utils, utils

    # Before anything else of the plugin: fairseq leaves alone what has been imported, and would not register its task.
    utils.import_user_module(Namespace(user_dir=str(ROOT / "fairseq_fastweights")))
    from fairseq_fastweights.data.byte_level_bpe import ByteLevelBPE

    try:
        tokenizer = ByteLevelBPE(Namespace(byte_level_folder=str(source)))
        # The model says by itself if this is not its dictionary.
        (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
            [str(checkpoint)], arg_overrides={"data": str(source)}
        )
    except ValueError as error:
        raise LambadaError(f"{checkpoint}: {error}") from error
    return model.eval(), task.target_dictionary, tokenizer.encode


def encode_passage(text: str, encode: Any, dictionary: Any) -> Passage:
    """The last word is what the whole has more than the context, its space included."""
    context, whole = encode(text[: text.rindex(" ")].rstrip()).split(), encode(text).split()
    return Passage([dictionary.index(word) for word in whole], len(whole) - len(context))


@torch.no_grad()
def score(model: Any, passages: Sequence[Passage], pad: int, batch: int) -> dict[str, Any]:
    """How many there are, the accuracy, and the perplexity of last words."""
    said, log_probability = 0, 0.0
    for group in _groups(passages, batch):
        length = max(len(passage.tokens) for passage in group) - 1
        # What follows a row's end is neither read nor scored.
        tokens = torch.tensor([[*p.tokens[:-1], *[pad] * (length + 1 - len(p.tokens))] for p in group])
        features, _ = model.decoder.extract_features(tokens.to(next(model.parameters()).device))
        for row, passage in zip(features, group, strict=True):
            end = len(passage.tokens) - 1
            logits = model.decoder.output_layer(row[None, end - passage.last : end])[0].float().cpu()
            log_probabilities, said_all = _of_words(logits, torch.tensor(passage.tokens[-passage.last :]))
            log_probability += log_probabilities
            said += said_all
    return {
        "passages": len(passages),
        "accuracy": said / len(passages),
        "perplexity": math.exp(-log_probability / len(passages)),
    }


def _groups(passages: Sequence[Passage], size: int) -> Iterator[Sequence[Passage]]:
    """Passages of like length, the longest first: a batch that does not fit into memory is met at once."""
    in_order = sorted(passages, key=lambda passage: -len(passage.tokens))
    return (in_order[start : start + size] for start in range(0, len(in_order), size))


def _of_words(logits: Tensor, words: Tensor) -> tuple[float, bool]:
    """(steps, vocabulary), (steps,) -> their log-probability together, and whether each is the most probable."""
    log_probabilities = logits.log_softmax(-1).gather(-1, words[:, None])
    return log_probabilities.sum().item(), bool((logits.argmax(-1) == words).all())


if __name__ == "__main__":
    sys.exit(main())
