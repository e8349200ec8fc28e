"""Trains a Linear Transformer and a Transformer to translate numbers, and scores them: `make demo-translation`.

    python examples/demo_translation/run.py [--out FOLDER] [--updates N] [--seed N] [--models ...]

Every command that it runs is shown, ready to be copied. What is finished is kept in --out: the
same call again, also after an interruption, goes on from there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, for the packages in it

from common.command_line import ArgumentParser, add_options, run_to_the_end
from common.commands import command, require_packages
from common.demo import SPLITS, Demo, Model
from common.fairseq_logs import find_in, read_nothing
from common.steps import Step, claim

from demo_translation.comparison import Row, count_copies, format_examples, format_rows
from demo_translation.translations import read_lines

FOLDER = Path(__file__).resolve().parent
MARK = "made-by-the-translation-demo"
SOURCE, TARGET = "en", "de"
BATCH = 700
"""Tokens to a batch, padding included."""
LANGUAGES = f"--source-lang {SOURCE} --target-lang {TARGET}"
TASK = f"--user-dir fairseq_fastweights --task translation {LANGUAGES} --cpu"
MODEL = """
    --arch fast_weight_transformer --encoder-layers 2 --decoder-layers 2
    --encoder-embed-dim 64 --encoder-ffn-embed-dim 256 --encoder-attention-heads 4 --decoder-attention-heads 4
    --share-all-embeddings --dropout 0
"""
TRAINING = f"""
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1
    --max-tokens {BATCH} --max-tokens-valid 4000 --clip-norm 1 --lr 0.004
"""
GENERATION = """
    --beam 4 --lenpen 0.6 --max-len-a 1 --max-len-b 10 --post-process sentencepiece
    --max-tokens 4000 --num-workers 0 --no-progress-bar
"""


MODELS = {
    "linear-transformer": Model("Linear Transformer", "--fast-weight-attention encoder,decoder,cross"),
    "transformer": Model("Transformer", "--fast-weight-attention none"),
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo; returns the exit status."""
    options = _parse(arguments)

    def work() -> None:
        require_packages("num2words", "sentencepiece", "sacrebleu", "matplotlib")
        with claim(options.out, MARK) as claimed:
            TranslationDemo(options, MODELS, claimed).run()

    return run_to_the_end(work)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(
        description="Trains a small Linear Transformer and a Transformer to translate numbers from English words to "
        "German words, scores and compares them. The same call again goes on where one was interrupted."
    )
    batch = f"at most {BATCH} tokens"
    add_options(parser, out=FOLDER / "out", updates=1500, batch=batch, seed="training", models=MODELS)
    return parser.parse_args(arguments)


class TranslationDemo(Demo):
    """All that is done in one folder."""

    def run(self) -> None:
        """Goes from the numbers to the table. Raises UserError if a command fails."""
        text = self.make_text()
        learned = self.learn_pieces(text)
        encoded = self.encode(text, learned)
        binarized = self.binarize(encoded)
        trained = {name: self.train(name, binarized) for name in self.models}
        generated = {name: self.generate(name, step) for name, step in trained.items()}
        ordered = {name: self.order(name, text, step) for name, step in generated.items()}
        scored = {name: self.score(name, text, step) for name, step in ordered.items()}
        each = (step for steps in (trained, generated, ordered, scored) for step in steps.values())
        self.runner.run([text, learned, encoded, binarized, *each])

        source, reference = (read_lines(text_of(text, "test", language)) for language in (SOURCE, TARGET))
        outputs = {name: read_lines(text_of(step, "test", TARGET)) for name, step in ordered.items()}
        rows = [
            self.row(name, trained[name], generated[name], scored[name], reference, outputs[name]) for name in outputs
        ]
        curves = {self.models[name].title: step.finished_result() for name, step in trained.items()}
        examples = format_examples(source, reference, {self.models[name].title: o for name, o in outputs.items()})
        # Before the first validation the models know little more than how frequent each token is.
        top = 2 * max(curve["valid_ppl"][0][1] for curve in curves.values())
        self.report(rows, curves, top, self.describe(rows, examples))

    def make_text(self) -> Step:
        folder = self.out / "text"
        return self.script("writing numbers in words", folder, "number_text.py", folder, package="num2words")

    def learn_pieces(self, text: Step) -> Step:
        folder = self.out / "pieces"
        files = [text_of(text, "train", language) for language in (SOURCE, TARGET)]
        words = ["train", folder / "joint.model", *files]
        return self.script(
            "learning pieces of words", folder, "pieces.py", *words, package="sentencepiece", after=[text]
        )

    def encode(self, text: Step, learned: Step) -> Step:
        folder = self.out / "encoded"
        files = [text_of(text, split, language) for split in SPLITS for language in (SOURCE, TARGET)]
        words = ["encode", learned.folder / "joint.model", folder, *files]
        title = "cutting words into pieces"
        return self.script(title, folder, "pieces.py", *words, package="sentencepiece", after=[learned])

    def binarize(self, encoded: Step) -> Step:
        texts = {split: encoded.folder / split for split in SPLITS}
        return self.preprocessing(texts, LANGUAGES, "--joined-dictionary", after=[encoded])

    def train(self, name: str, binarized: Step) -> Step:
        model, folder = self.models[name], self.out / name / "model"
        options = [TASK, MODEL, model.options, TRAINING]
        return self.training(model.title, folder, binarized, *options, warmup=100, interval=-(-self.updates // 10))

    def generate(self, name: str, trained: Step) -> Step:
        folder, title = self.out / name / "generated", f"translating with the {self.models[name].title}"

        def read(log: str) -> dict[str, Any]:
            # The speed goes to the log or to the results, by what fairseq has imported before.
            return read_speed(log + generated_in(folder).read_text(encoding="utf-8"))

        options = [TASK, GENERATION, "--results-path", folder]
        return self.using("fairseq-generate", title, folder, trained, *options, read_result=read)

    def order(self, name: str, text: Step, generated: Step) -> Step:
        folder = self.out / name / "translations"
        files = [generated_in(generated.folder), text_of(text, "test", SOURCE), folder / f"test.{TARGET}"]
        title = f"ordering the translations of the {self.models[name].title}"
        return self.script(title, folder, "translations.py", *files, after=[text, generated])

    def score(self, name: str, text: Step, ordered: Step) -> Step:
        files: list[str | Path] = [text_of(text, "test", TARGET), "--input", text_of(ordered, "test", TARGET)]
        title, words = (
            f"scoring the {self.models[name].title}",
            command("sacrebleu", *files, "--metrics bleu --width 2"),
        )
        return Step(title, self.out / name / "bleu", words, read_bleu, after=[text, ordered])

    def script(
        self, title: str, folder: Path, name: str, *words: str | Path, package: str = "", after: Sequence[Step] = ()
    ) -> Step:
        """A step of one of the scripts beside this one, which depends on what that says and on a package's version."""
        path = FOLDER / name
        uses = hashlib.sha256(path.read_bytes()).hexdigest() + (version(package) if package else "")
        return Step(title, folder, command("python", path, *words), read_nothing, after=after, depends_on=uses)

    def row(
        self, name: str, trained: Step, generated: Step, scored: Step, reference: list[str], output: list[str]
    ) -> Row:
        learned, bleu = trained.finished_result(), scored.finished_result()
        return Row(
            self.models[name].title,
            learned["parameters"] - count_copies(trained.folder / "checkpoint_best.pt"),
            learned["best_valid_ppl"],
            bleu["score"],
            bleu["signature"],
            sum(map(str.__eq__, reference, output)),
            len(reference),
            learned["tokens_per_second"],
            generated.finished_result()["sentences_per_second"],
        )

    def describe(self, rows: list[Row], examples: str) -> list[str]:
        """The table, and what is to be said of it."""
        return [
            format_rows(rows),
            "",
            f"- BLEU: of {rows[0].lines:,} numbers that are not in the training text, with beam 4; sacrebleu's",
            *(f"  {signature}" for signature in dict.fromkeys(row.signature for row in rows)),
            "- parameters: without the copies of its weights that fairseq's softmax encoder keeps beside them.",
            "- tokens/s and sentences/s: on one core.",
            "",
            examples,
        ]


def text_of(step: Step, split: str, language: str) -> Path:
    """A text that a step leaves in its folder."""
    return step.folder / f"{split}.{language}"


def generated_in(folder: Path) -> Path:
    """The output of `fairseq-generate --results-path`."""
    return folder / "generate-test.txt"


def read_speed(log: str) -> dict[str, Any]:
    """Reads the log of `fairseq-generate`."""
    speed = find_in(log, "speed", r"\| Translated [\d,]+ sentences .* \((\S+) sentences/s,")
    return {"sentences_per_second": float(speed[0])}


def read_bleu(log: str) -> dict[str, Any]:
    """Reads the output of `sacrebleu`."""
    result = json.loads(find_in(log, "score", r"(?s)^\{.*^\}")[0])
    return {"score": result["score"], "signature": result["signature"]}


if __name__ == "__main__":
    sys.exit(main())
