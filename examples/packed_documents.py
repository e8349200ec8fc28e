#!/usr/bin/env python
"""Fine-tunes a model of Hugging Face's transformers on documents that are streamed from local files and packed.

A row of a batch holds several documents, whose places (`position_ids`) begin again with each: no document sees the one
before it, and nothing is padded. MODEL is a folder that `to-huggingface` made, or another causal model of transformers
that keeps such documents apart. FILES are .jsonl or .json (field "text"), or .txt with documents between blank lines.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import datasets
import transformers

import fairseq_fastweights.huggingface  # noqa: F401  the Auto classes know the models from here on
from fairseq_fastweights.invalid_input import check_number
from fairseq_fastweights.suggestions import ArgumentParser

NOTHING = -100
"""The label of tokens that are not to be predicted."""


class Packer:
    """Cuts documents, one after the other, into rows of one length; the rest begins the next row.

    Args:
        length: of rows, in tokens.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._rest: list[tuple[int, int, int]] = []

    def __call__(self, batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        """The rows that are full after these `input_ids`, with places in documents, and labels."""
        rows: dict[str, list[list[int]]] = {"input_ids": [], "position_ids": [], "labels": []}
        for document in batch["input_ids"]:
            # A document's first token has nothing to be predicted from.
            self._rest += [(number, place, number if place else NOTHING) for place, number in enumerate(document)]
            while len(self._rest) >= self.length:
                row, self._rest = self._rest[: self.length], self._rest[self.length :]
                for column, values in zip(rows.values(), zip(*row, strict=True), strict=True):
                    column.append(list(values))
                # A document that goes on in the next row begins there: it sees nothing of this one.
                shift = self._rest[0][1] if self._rest else 0
                self._rest = [(number, place - shift, label) for number, place, label in self._rest]
        return rows


def check(files: list[str]) -> None:
    """Raises ValueError if there are files of several kinds, or of another kind than can be read, or one is missing."""
    kinds = {Path(file).suffix for file in files}
    if len(kinds) > 1 or not kinds <= {".json", ".jsonl", ".txt"}:
        raise ValueError(f"FILES end in {', '.join(sorted(kinds))}; all must end in .jsonl, .json or .txt, and alike")
    for file in files:
        if not Path(file).is_file():
            raise ValueError(f"FILES have {file}, which is no file")


def stream(files: list[str], tokenizer: Any, length: int, buffer: int, seed: int) -> Any:
    """The packed rows of the documents in files, which are read as they are needed, shuffled in a buffer.

    Args:
        files: their names, as `check` takes them.
        tokenizer: puts the token that begins a text before each document.
        length: of rows, in tokens.
        buffer: number of documents from which the next is drawn.
        seed: of the draws.
    """
    text = Path(files[0]).suffix == ".txt"
    how: dict[str, Any] = {"path": "text", "sample_by": "paragraph"} if text else {"path": "json"}
    documents = datasets.load_dataset(**how, data_files=files, split="train", streaming=True)
    documents = documents.filter(lambda row: row["text"].strip()).shuffle(seed=seed, buffer_size=buffer)
    numbers = documents.map(
        lambda rows: {"input_ids": tokenizer(rows["text"])["input_ids"]}, batched=True, remove_columns=["text"]
    ).select_columns(["input_ids"])
    return numbers.map(Packer(length), batched=True, batch_size=100, remove_columns=["input_ids"])


def main(arguments: list[str] | None = None) -> None:
    """Runs the command."""
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("target", metavar="TARGET", type=Path, help="the new folder")
    parser.add_argument("files", metavar="FILES", nargs="+")
    for name, default, meaning in (
        ("length", 512, "tokens in a row"),
        ("batch-size", 8, "rows in a batch"),
        ("updates", 100, "number of updates"),
        ("buffer", 1000, "documents from which the next is drawn"),
        ("seed", 1, "seed of the order"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} (default: {default})")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate at its peak (default: 1e-4)")
    options = parser.parse_args(arguments)
    try:
        for name in ("length", "batch_size", "updates", "buffer"):
            check_number(f"--{name.replace('_', '-')}", getattr(options, name), 1, whole=True)
        check_number("--lr", options.lr, above=0)
        check(options.files)  # before a model is loaded
    except ValueError as error:
        parser.error(str(error))
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model)
    training = transformers.TrainingArguments(
        str(options.target),
        max_steps=options.updates,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.lr,
        lr_scheduler_type="cosine",
        seed=options.seed,
        save_strategy="no",
        report_to="none",
        logging_steps=10,
    )
    rows = stream(options.files, tokenizer, options.length, options.buffer, options.seed)
    trainer = transformers.Trainer(
        model, training, train_dataset=rows, data_collator=transformers.default_data_collator
    )
    trainer.train()
    trainer.save_model()
    tokenizer.save_pretrained(options.target)
    if (kept := Path(options.model) / "fairseq").is_dir():  # for `from-huggingface`
        shutil.copytree(kept, options.target / "fairseq", dirs_exist_ok=True)


if __name__ == "__main__":
    main()
