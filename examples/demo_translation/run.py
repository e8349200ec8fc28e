"""Trains a Linear Transformer and a Transformer to translate numbers, and scores them: `make demo-translation`.

    python examples/demo_translation/run.py [--out FOLDER] [--updates N] [--seed N] [--models ...]

Every command that it runs is shown, ready to be copied. Finished steps are kept in --out: the
same call again, also after an interruption, goes on from there.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, for the packages in it

from common.command_line import ArgumentParser, run_to_the_end
from common.commands import program, require_packages, shown
from common.demo import TRAINING, Trained, add_options, preprocessing, run_steps, schedule, train_and_score
from common.files import SPLITS, read_text, write_whole
from common.steps import Step, claim, read_json, write_json
from common.tables import format_table
from papers.rows import BEST, Row
from papers.translation import Translation

FOLDER = Path(__file__).resolve().parent
MARK = "made-by-the-translation-demo"
BATCH = 700
"""Tokens to a batch, padding included."""
LANGUAGES = {"source": "en", "target": "de"}
MODEL = """
    --arch fast_weight_transformer --encoder-layers 2 --decoder-layers 2
    --encoder-embed-dim 64 --encoder-ffn-embed-dim 256 --encoder-attention-heads 4 --decoder-attention-heads 4
    --share-all-embeddings --dropout 0 --max-tokens-valid 4000 --clip-norm 1 --lr 0.004
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1
"""
GENERATION = "--cpu --num-workers 0 --max-tokens 4000 --max-len-b 10"
MODELS = {
    "linear-transformer": ("Linear Transformer", "--fast-weight-attention encoder,decoder,cross"),
    "transformer": ("Transformer", "--fast-weight-attention none"),
}
"""Titles, and the options in which they differ."""

EXAMPLES = 3
"""Translations to look at, besides a wrong one."""

# Weights that a layer of fairseq's encoder holds a second time, side by side for a fused kernel.
_COPY = re.compile(r"\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)$")


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo; returns the exit status."""
    parser = ArgumentParser(
        description="Trains a small Linear Transformer and a Transformer to translate numbers from English words to "
        "German words, scores and compares them. The same call again goes on where one was interrupted."
    )
    batch = f"at most {BATCH} tokens"
    add_options(parser, out=FOLDER / "out", updates=1500, batch=batch, seed="training", models=MODELS)
    options = parser.parse_args(arguments)
    options.out = options.out.resolve()

    def work() -> None:
        require_packages("num2words", "sentencepiece", "sacrebleu", "matplotlib")
        with claim(options.out, MARK):
            compare(options)

    return run_to_the_end(work)


def compare(options: argparse.Namespace) -> None:
    """Goes from the numbers to the table. Raises UserError if a command fails."""
    started, out = time.monotonic(), options.out
    text = script("writing numbers in words", "number_text.py", out / "text", package="num2words")
    words = [out / "text", out / "pieces"]
    pieces = script("cutting words into pieces", "pieces.py", *words, package="sentencepiece", after=[text])
    sides = [word for side, name in LANGUAGES.items() for word in (f"--{side}-lang", name)]
    prefixes = {split: pieces.folder / split for split in SPLITS}
    run_steps(text, pieces, preprocessing(out, prefixes, *sides, "--joined-dictionary", after=[pieces]))
    # Beside the numbers, the files that examples/wmt14/generate.sh reads.
    (out / "bin" / "raw").mkdir(exist_ok=True)
    for split in SPLITS[1:]:
        for language in LANGUAGES.values():
            shutil.copy(text.folder / f"{split}.{language}", out / "bin" / "raw")
    shutil.copy(pieces.folder / "subwords.model", out / "bin")
    write_json(out / "bin" / "preparation.json", {"made from": {"subwords": "sentencepiece", **LANGUAGES}})

    # Ten validations, whose number does not depend on the length of the training.
    planned = f"{MODEL} {TRAINING} {schedule(options.updates, 100, -(-options.updates // 10))}"
    recipe = Translation(planned, tokens=BATCH, generate=GENERATION)
    rows = {name: Row(title, recipe, words, ()) for name, (title, words) in MODELS.items() if name in options.models}
    trained = train_and_score("demo-translation", rows, options, MARK)

    source, reference = (read_text(text.folder / f"test.{language}") for language in LANGUAGES.values())
    outputs = {rows[name].model: read_text(model.folder / "generate-test.hyp") for name, model in trained.items()}
    signatures = (read_json(model.folder / "generate-test.json")["signature"] for model in trained.values())
    header = ["model", "parameters", "BLEU", "exact matches", "training tokens/s", "generated sentences/s"]
    lines = [
        format_table(header, [cells(rows[name].model, model, reference) for name, model in trained.items()]),
        "",
        f"- BLEU: of {len(reference):,} numbers that are not in the training text, with beam 4; sacrebleu's",
        *(f"  {signature}" for signature in dict.fromkeys(signatures)),
        "- parameters: without the copies of its weights that fairseq's softmax encoder keeps beside them.",
        "- tokens/s and sentences/s: on one core.",
        "",
        format_examples(source, reference, outputs),
    ]
    write_whole(out / "table.md", "\n".join(lines) + "\n")
    print("", *lines, "", f"table:  {shown(out / 'table.md')}", f"curves: {shown(out / 'curves.png')}", sep="\n")
    print(f"done in {time.monotonic() - started:.0f} s")


def script(title: str, name: str, *words: Path, package: str, after: list[Step] | None = None) -> Step:
    """A step of a script beside this one, which fills the last of the folders; it depends on the script's text and on a
    package's version.
    """
    uses = hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() + version(package)
    command = [program("python"), shown(FOLDER / name), *map(str, words)]
    return Step(title, words[-1], command, after=after or [], depends_on=uses)


def cells(title: str, model: Trained, reference: list[str]) -> list[str]:
    """A row of the table."""
    generated, output = read_json(model.folder / "generate-test.json"), read_text(model.folder / "generate-test.hyp")
    parameters, exact = model.entry.parameters - count_copies(model.folder / BEST), map(str.__eq__, reference, output)
    found = [f"{parameters:,}", f"{generated['bleu']:.2f}", f"{sum(exact):,} of {len(reference):,}"]
    speed = generated["sentences"] / generated["seconds"]
    return [title, *found, f"{model.entry.words_per_second or 0:,.0f}", f"{speed:,.0f}"]


def format_examples(source: Sequence[str], reference: Sequence[str], outputs: dict[str, Sequence[str]]) -> str:
    """The first sentences, and another that a model gets wrong, as a Markdown list.

    `source`, `reference`: the test text. `outputs`: the translations, by the title of their model.
    """

    def example(number: int) -> list[str]:
        lines = [f"- {source[number]}", f"  - reference: {reference[number]}"]
        for title, texts in outputs.items():
            wrong = "" if texts[number] == reference[number] else ", wrong"
            lines.append(f"  - {title}{wrong}: {texts[number]}")
        return lines

    lines = ["The first of the test text:", ""]
    for number in range(min(EXAMPLES, len(source))):
        lines += example(number)
    wrong = {title: [n for n, text in enumerate(texts) if text != reference[n]] for title, texts in outputs.items()}
    if not any(wrong.values()):
        return "\n".join([*lines, "", "No translation is wrong."])
    for title, numbers in wrong.items():
        others = [number for number in numbers if number >= EXAMPLES]
        if others:
            return "\n".join([*lines, "", f"One that the {title} gets wrong:", "", *example(others[0])])
    return "\n".join(lines)


def count_copies(checkpoint: Path) -> int:
    """Parameters that fairseq's own encoder layers have twice, which it counts and training leaves alone."""
    from fairseq_fastweights.conversion.files.weight_files import load_safely

    state = load_safely(checkpoint)["model"]
    return sum(value.numel() for name, value in state.items() if _COPY.search(name))


if __name__ == "__main__":
    sys.exit(main())
