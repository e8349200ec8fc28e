"""Trains three small language models on real English and compares them: what `make demo` does.

    python examples/demo/run.py [--data FOLDER] [--out FOLDER] [--updates N] [--seed N] [--models ...]

Every command that it runs is shown, ready to be copied. What is finished is kept in --out: the
same call again, also after an interruption, goes on from there.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, for the packages in it

from common.command_line import ArgumentParser, add_options, run_to_the_end
from common.commands import require_packages
from common.demo import SPLITS, Demo, Model
from common.fairseq_logs import find_in
from common.files import write_whole
from common.steps import Step, claim, read_json, write_json

from demo.comparison import Row, Unigram, format_rows
from demo.corpora import Corpus, corpus_in, english_corpus

MARK = "made-by-the-demo"
SEGMENT, BATCH = 64, 16
"""Tokens to a segment or a window, and segments to a batch."""
PREPROCESS = "--only-source --thresholdsrc 2 --nwordssrc 8000"
TASK = "--user-dir fairseq_fastweights --task fast_weight_language_modeling --cpu"
MODEL = """
    --arch fast_weight_lm --decoder-layers 3 --decoder-attention-heads 8
    --decoder-embed-dim 128 --decoder-input-dim 128 --decoder-output-dim 128
    --decoder-ffn-embed-dim 512 --share-decoder-input-output-embed
    --no-token-positional-embeddings --dropout 0.2
"""
TRAINING = f"--tokens-per-sample {SEGMENT} --batch-size {BATCH} --clip-norm 0.25 --lr 0.003"
CARRY_OVER = "--carry-over-state --batch-size-valid 4"
SAMPLING = "--beam 3 --nbest 3 --unkpen 100 --max-len-b 60"
MOST_LIKELY = 10
"""Each token is drawn from so many that are the most likely, or from all of a dictionary with fewer."""
MOST_POSITIONS = 600_000
"""About how many positions the sliding window may have to compute for a score."""
PROMPT = 6
"""Tokens to a prompt."""


MODELS = {
    "transformer": Model("Transformer", "--softmax-attention-layers all"),
    "linear-transformer": Model("Linear Transformer", "--update-rule sum", carries=True),
    "delta-network": Model("Delta Network", "--update-rule delta", carries=True),
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo; returns the exit status."""
    options = _parse(arguments)

    def work() -> None:
        require_packages("matplotlib")
        corpus = english_corpus() if options.data is None else corpus_in(options.data)
        with claim(options.out, MARK) as claimed:
            LanguageDemo(options, corpus, claimed).run()

    return run_to_the_end(work)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(
        description="Trains a small Transformer, Linear Transformer and Delta Network on the same "
        "text, scores and compares them. The same call again goes on where one was interrupted."
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="a folder with train, valid and test text: train.txt, train or wiki.train.tokens, or "
        "one of these with .gz, and so on; words are what stands between white space "
        "(default: English that Python itself carries)",
    )
    out, batch = Path(__file__).resolve().parent / "out", f"{BATCH * SEGMENT} tokens"
    add_options(parser, out=out, updates=300, batch=batch, seed="training and sampling", models=MODELS)
    return parser.parse_args(arguments)


Steps = dict[tuple[str, bool], Step]
"""By the name of the model, and whether its state is carried over."""


class LanguageDemo(Demo):
    """All that is done in one folder, for one corpus, from which the models learn."""

    def __init__(self, options: argparse.Namespace, corpus: Corpus, claimed: int) -> None:
        super().__init__(options, MODELS, claimed)
        self.corpus = corpus

    def run(self) -> None:
        """Goes from the text to the table. Raises UserError if a command fails."""
        counts = ", ".join(f"{self.corpus.tokens[split]:,} tokens of {split}" for split in SPLITS)
        self.runner.say(f"{self.corpus.origin}: {counts}, line ends included")
        self.write_text()
        binarized = self.binarize()
        self.runner.run([binarized])

        vocabulary = read_vocabulary(binarized.folder / "dict.txt")
        prompt = choose_prompt(self.corpus, vocabulary)
        trained = {
            (name, carries): self.train(name, carries, binarized)
            for name, model in self.models.items()
            for carries in ([False, True] if model.carries else [False])
        }
        scored = {key: self.score(*key, step) for key, step in trained.items()}
        writer = list(self.models)[-1]
        sampled = self.sample(writer, prompt, trained[writer, False])
        self.runner.run([*trained.values(), *scored.values(), sampled])

        rows = [self.unigram_row(vocabulary)]
        rows += [self.row(name, trained, scored) for name in self.models]
        curves = {self.label(*key): step.finished_result() for key, step in trained.items()}
        lines = self.describe(rows, prompt, MODELS[writer].title, sampled.finished_result()["texts"])
        self.report(rows, curves, 2.5 * rows[0].valid, lines, **{rows[0].title: rows[0].valid})

    def write_text(self) -> None:
        """Writes the corpus into the folder `text`, whole or not at all."""
        folder, mark = self.out / "text", {"digest": self.corpus.digest}
        if read_json(folder / "done.json") == mark:
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self.corpus.write(folder)
        write_json(folder / "done.json", mark)

    def binarize(self) -> Step:
        texts = {split: self.out / "text" / f"{split}.txt" for split in SPLITS}
        return self.preprocessing(texts, PREPROCESS, depends_on=self.corpus.digest)

    def train(self, name: str, carries: bool, binarized: Step) -> Step:
        title, folder = self.label(name, carries), self.out / name / _mode(carries)
        options = [TASK, self.models[name].options, CARRY_OVER if carries else "", MODEL, TRAINING]
        return self.training(title, folder, binarized, *options, warmup=50, interval=self.interval())

    def label(self, name: str, carries: bool) -> str:
        return f"{self.models[name].title}{', carried over' if carries else ''}"

    def interval(self) -> int:
        """Updates between validations: at most ten, and in all no more than a third of the work.

        A validation costs a third of what training on the same text does.
        """
        affordable = self.updates * SEGMENT * BATCH // self.corpus.tokens["valid"]
        return -(-self.updates // max(1, min(10, affordable)))

    def score(self, name: str, carries: bool, trained: Step) -> Step:
        if carries:
            context = f"--carry-over-state --tokens-per-sample {SEGMENT}"
        else:
            new = window_step(self.corpus.tokens["test"])
            context = f"--tokens-per-sample {SEGMENT} --context-window {SEGMENT - new} --max-tokens 4096"
        title, folder = f"scoring the {self.label(name, carries)}", self.out / name / f"{_mode(carries)}-test"
        options = f"--gen-subset test {context} --num-workers 0 --no-progress-bar"
        return self.using("fairseq-eval-lm", title, folder, trained, TASK, options, read_result=read_perplexity)

    def sample(self, name: str, prompt: str, trained: Step) -> Step:
        file = self.out / "prompt.txt"
        write_whole(file, f"{prompt}\n")
        drawn = f"--sampling --sampling-topk {min(MOST_LIKELY, count_entries(self.out / 'bin' / 'dict.txt'))}"
        options = [TASK, drawn, SAMPLING, f"--seed {self.seed} --input", file]
        title, folder = f"sampling from the {self.label(name, False)}", self.out / name / "sample"
        others = {"read_result": read_continuations, "depends_on": prompt}
        return self.using("fairseq-interactive", title, folder, trained, *options, **others)

    def unigram_row(self, vocabulary: list[str]) -> Row:
        unigram = Unigram(vocabulary, self.corpus.lines("train"))
        valid, test = (unigram.perplexity(self.corpus.lines(split)) for split in SPLITS[1:])
        return Row("unigram", len(unigram.types), valid, test, test)

    def row(self, name: str, trained: Steps, scored: Steps) -> Row:
        training = trained[name, False].finished_result()
        carried = scored.get((name, True))
        sliding = scored[name, False].finished_result()["ppl"]
        going_on = None if carried is None else carried.finished_result()["ppl"]
        title, valid = self.models[name].title, training["best_valid_ppl"]
        return Row(title, training["parameters"], valid, sliding, going_on, training["tokens_per_second"])

    def describe(self, rows: list[Row], prompt: str, writer: str, texts: list[str]) -> list[str]:
        """The table, and what is to be said of it."""
        new = window_step(self.corpus.tokens["test"])
        return [
            format_rows(rows),
            "",
            f"- valid, sliding window: perplexity of models trained on separate segments of {SEGMENT} tokens;",
            f"  a window of {SEGMENT} tokens moves over the test text by {new} at a time.",
            "- carried over: of the same models, trained and scored with the state that all the text before has left.",
            "- unigram: what knowing no context at all, only how frequent each token is, would give.",
            "- tokens/s: of training, on one core.",
            "",
            f"The {writer} goes on after {prompt!r}:",
            "",
            *(f"- {text.removeprefix(prompt).strip()}" for text in texts),
        ]


def read_perplexity(log: str) -> dict[str, Any]:
    """Reads the log of `fairseq-eval-lm`."""
    return {"ppl": float(find_in(log, "perplexity", r"Perplexity: (\S+)")[-1])}


def read_continuations(log: str) -> dict[str, Any]:
    """Reads the log of `fairseq-interactive`."""
    return {"texts": find_in(log, "text", r"^H-\d+\t\S+\t(.*)$")}


def read_vocabulary(path: Path) -> list[str]:
    """The words of a fairseq dictionary."""
    with path.open(encoding="utf-8") as file:
        words = [line.rstrip("\n").rpartition(" ")[0] for line in file]
    return [word for word in words if not word.startswith("madeupword")]


def count_entries(path: Path) -> int:
    """How many tokens a model with this dictionary knows: what is in the file, and the four that fairseq adds to it."""
    return path.read_text(encoding="utf-8").count("\n") + 4


def choose_prompt(corpus: Corpus, vocabulary: list[str]) -> str:
    """The first words of the first long line of the test text of which the models know all."""
    known = set(vocabulary)
    for line in corpus.lines("test"):
        words = line.split()
        if len(words) >= 2 * PROMPT and known.issuperset(words[:PROMPT]):
            return " ".join(words[:PROMPT])
    return next(iter(vocabulary), "<unk>")


def window_step(tokens: int) -> int:
    """By how many tokens the sliding window moves on: by one, or by more if the text is long."""
    step = 1
    while step < SEGMENT // 2 and tokens * SEGMENT // step > MOST_POSITIONS:
        step *= 2
    return step


def _mode(carries: bool) -> str:
    return "carried" if carries else "segments"


if __name__ == "__main__":
    sys.exit(main())
