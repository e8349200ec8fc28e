"""Trains three small language models on real English and compares them: the program of `make demo`.

    python examples/demo/run.py [--data FOLDER] [--out FOLDER] [--updates N] [--seed N] [--models ...]

Every command that it runs is shown, ready to be copied. Finished steps are kept in --out: the
same call again, also after an interruption, goes on from there.
"""

from __future__ import annotations

import argparse
import math
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, for the packages in it

from common.command_line import ArgumentParser, run_to_the_end
from common.commands import program, require_packages, shown
from common.demo import TRAINING, add_options, preprocessing, run_steps, schedule, train_and_score
from common.fairseq_logs import find_in
from common.files import SPLITS, write_whole
from common.steps import Step, claim, read_json, write_json
from common.tables import format_table
from papers.language_models import TASK, LanguageModel
from papers.rows import BEST, Row, plugin

from demo.corpora import Corpus, corpus_in, english_corpus

MARK = "made-by-the-demo"
SEGMENT, BATCH = 64, 16
"""Tokens to a segment or a window, and segments to a batch."""
PREPROCESS = "--only-source --thresholdsrc 2 --nwordssrc 8000".split()
MODEL = """
    --arch fast_weight_lm --decoder-layers 3 --decoder-attention-heads 4
    --decoder-embed-dim 128 --decoder-input-dim 128 --decoder-output-dim 128
    --decoder-ffn-embed-dim 512 --share-decoder-input-output-embed
    --no-token-positional-embeddings --dropout 0.2 --clip-norm 0.25 --lr 0.003
"""
SAMPLING = "--cpu --beam 3 --nbest 3 --unkpen 100 --max-len-b 60"
MOST_LIKELY = 10
"""Each token is drawn from so many that are the most likely, or from all of a dictionary with fewer."""
MOST_POSITIONS = 600_000
"""About how many positions the sliding window may have to compute for a score."""
PROMPT = 6
"""Tokens to a prompt."""
MODELS = {
    "transformer": ("Transformer", "--mixers softmax --rotary-dim 16"),
    "linear-transformer": ("Linear Transformer", "--mixers sum"),
    "gated-delta": ("Gated DeltaNet", "--mixers gated-delta"),
}
"""Titles, and the options in which they differ; all but the first also carry their state through the test text."""
DECODE = Path(__file__).resolve().parent / "decode.py"


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo; returns the exit status."""
    parser = ArgumentParser(
        description="Trains a small Transformer, Linear Transformer and Gated DeltaNet on the same "
        "text, scores and compares them. The same call again goes on where one was interrupted."
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="a folder with train, valid and test text: train.txt, train or wiki.train.tokens, or "
        "one of these with .gz, and so on; words stand between white space "
        "(default: English that Python itself carries)",
    )
    out, batch = Path(__file__).resolve().parent / "out", f"{BATCH * SEGMENT} tokens"
    add_options(parser, out=out, updates=300, batch=batch, seed="training and sampling", models=MODELS)
    options = parser.parse_args(arguments)
    options.out = options.out.resolve()

    def work() -> None:
        require_packages("matplotlib")
        corpus = english_corpus() if options.data is None else corpus_in(options.data)
        with claim(options.out, MARK):
            compare(options, corpus)

    return run_to_the_end(work)


def compare(options: argparse.Namespace, corpus: Corpus) -> None:
    """Goes from the text to the table. Raises UserError if a command fails."""
    started, out = time.monotonic(), options.out
    counts = ", ".join(f"{corpus.tokens[split]:,} tokens of {split}" for split in SPLITS)
    print(f"{corpus.origin}: {counts}, line ends included", flush=True)
    if read_json(out / "text" / "done.json") != {"digest": corpus.digest}:
        shutil.rmtree(out / "text", ignore_errors=True)
        (out / "text").mkdir()
        corpus.write(out / "text")
        write_json(out / "text" / "done.json", {"digest": corpus.digest})
    texts = {split: out / "text" / f"{split}.txt" for split in SPLITS}
    run_steps(preprocessing(out, texts, *PREPROCESS, depends_on=corpus.digest))

    moves = window_step(corpus.tokens["test"])
    trained = train_and_score("demo", dict(rows(options, corpus, moves)), options, MARK)
    vocabulary = read_vocabulary(out / "bin" / "dict.txt")
    prompt, writer = choose_prompt(corpus, vocabulary), list(options.models)[-1]
    sampled = sample(options, prompt, trained[writer].folder, MODELS[writer][0])
    run_steps(sampled)
    timed = decode(options, {MODELS[name][0]: trained[name].folder for name in options.models})
    run_steps(timed)  # after the others, which would slow it down

    unigram = Unigram(vocabulary, corpus.lines("train"))
    valid, test = (unigram.perplexity(corpus.lines(split)) for split in SPLITS[1:])
    cells = [["unigram", f"{len(unigram.types):,}", *(f"{x:.2f}" for x in (valid, test, test)), "-"]]
    for name in options.models:
        entry = trained[name].entry
        # fairseq keeps the checkpoint of the lowest validation perplexity, which is the one that was scored.
        best = min(perplexity for _, perplexity in entry.valid)
        carried = f"{entry.scores['test, carried']:.2f}" if "test, carried" in entry.scores else "-"
        found = [f"{entry.parameters:,}", f"{best:.2f}", f"{sliding(entry.scores):.2f}", carried]
        cells.append([MODELS[name][0], *found, f"{entry.words_per_second or 0:,.0f}"])
    decoding = timed.finished_result()["models"]
    lengths = [f"after {length:,} tokens" for length, _, _ in next(iter(decoding.values()))]
    steps = [
        [
            title,
            *(f"{kilobytes:,.0f}" for _, kilobytes, _ in found),
            *(f"{milliseconds:.1f}" for *_, milliseconds in found),
        ]
        for title, found in decoding.items()
    ]
    lines = [
        format_table(["model", "parameters", "valid", "test, sliding window", "test, carried over", "tokens/s"], cells),
        "",
        f"- valid, sliding window: perplexity with a context of {SEGMENT} tokens, as in training; a window of",
        f"  {SEGMENT} tokens moves over the test text by {moves} at a time.",
        "- carried over: the same model reads the test text in one pass, from its first token to its last.",
        "- unigram: the perplexity without any context, from the frequency of each token.",
        "- tokens/s: of training, on one core.",
        "",
        format_table(["model", *(f"kB {x}" for x in lengths), *(f"ms {x}" for x in lengths)], steps),
        "",
        "- kB: kept of a text: the KV cache of the Transformer, and the states of the others.",
        "- ms: the fastest of 40 decode steps of 8 texts at once, on one core.",
        "",
        f"The {MODELS[writer][0]} goes on after {prompt!r}:",
        "",
        *(f"- {text.removeprefix(prompt).strip()}" for text in sampled.finished_result()["texts"]),
        "",
        *(summary(MODELS[name][0], trained[name].entry.scores, decoding) for name in options.models),
    ]
    write_whole(out / "table.md", "\n".join(lines) + "\n")
    print("", f"table:  {shown(out / 'table.md')}", f"curves: {shown(out / 'curves.png')}", "", *lines, "", sep="\n")
    print(f"Done in {time.monotonic() - started:.0f} s. docs/get-started.md trains such a model by hand.")


def sliding(scores: Mapping[str, float]) -> float:
    """The test perplexity of a window, whatever its size."""
    [perplexity] = (score for name, score in scores.items() if name.startswith("test, context-"))
    return perplexity


def summary(title: str, scores: Mapping[str, float], decoding: Mapping[str, list[list[float]]]) -> str:
    """A model's quality, state and speed in one line."""
    length, kilobytes, milliseconds = decoding[title][-1]
    best = min(score for name, score in scores.items() if name.startswith("test, "))
    return (
        f"- {title}: test perplexity {best:.2f}; after {length:,} tokens it keeps {kilobytes:,.0f} kB of a text, and a "
        f"decode step takes {milliseconds:.1f} ms"
    )


def rows(options: argparse.Namespace, corpus: Corpus, moves: int) -> Iterator[tuple[str, Row]]:
    """The trainings, by name. A window of the test text moves by `moves` tokens."""
    # At most ten validations, which in all take a third of the work: one costs a third of a training on the same text.
    affordable = options.updates * SEGMENT * BATCH // corpus.tokens["valid"]
    interval = -(-options.updates // max(1, min(10, affordable)))
    for name in options.models:
        title, words = MODELS[name]
        recipe = LanguageModel(
            f"{MODEL} {TRAINING} {schedule(options.updates, 50, interval)}",
            batch=BATCH,
            length=SEGMENT,
            modes=(f"context-{SEGMENT - moves}", *["carried"] * (name != "transformer")),
            splits="test",
            evaluate="--cpu --num-workers 0 --max-tokens 4096",
        )
        yield name, Row(title, recipe, words, ())


def decode(options: argparse.Namespace, folders: Mapping[str, Path]) -> Step:
    """The size of each model's state and the time of a decode step, by the number of tokens before it."""
    titles = {str(folder / BEST): title for title, folder in folders.items()}

    def read(log: str) -> dict[str, dict[str, list[list[float]]]]:
        models: dict[str, list[list[float]]] = {title: [] for title in folders}
        for path, length, size, duration in find_in(
            log, "time", r"^(.+): after (\d+) tokens (\d+) bytes, ([\d.]+) ms$"
        ):
            models[titles[path]].append([int(length), int(size) / 1000, float(duration)])
        return {"models": models}

    return Step(
        title="decoding after short and long texts",
        folder=options.out / "decode",
        command=[shown(DECODE), str(options.out / "bin"), *titles],
        read_result=read,
        depends_on=" ".join((folder / "done.json").read_text() for folder in folders.values()),
    )


def sample(options: argparse.Namespace, prompt: str, folder: Path, title: str) -> Step:
    """Text that a model goes on with after a prompt, by `fairseq-interactive`."""
    out, file = options.out, options.out / "prompt.txt"
    write_whole(file, f"{prompt}\n")
    entries = (out / "bin" / "dict.txt").read_text(encoding="utf-8").count("\n") + 4  # fairseq adds four symbols
    words = [program("fairseq-interactive"), str(out / "bin"), "--path", str(folder / BEST)]
    words += ["--user-dir", shown(plugin()), "--task", TASK, *shlex.split(SAMPLING), "--seed", str(options.seed)]
    words += ["--sampling", "--sampling-topk", str(min(MOST_LIKELY, entries)), "--input", str(file)]
    return Step(
        title=f"sampling from the {title}",
        folder=folder / "sample",
        command=words,
        read_result=lambda log: {"texts": find_in(log, "text", r"^H-\d+\t\S+\t(.*)$")},
        # Of the weights: the folder's training may have been another before.
        depends_on=f"{prompt} {(folder / 'done.json').read_text()}",
    )


class Unigram:
    """Predicts each token by how often it occurs in the training text, whatever comes before.

    `vocabulary`: the words that models know, without fairseq's special symbols. `lines`: the training text. Each type's
    count is raised by 1, so that none has probability 0.
    """

    def __init__(self, vocabulary: Iterable[str], lines: Iterable[str]) -> None:
        self.types = {*vocabulary, "<unk>", "</s>"}
        self.counts = self._count(lines)
        self.total = self.counts.total() + len(self.types)

    def perplexity(self, lines: Iterable[str]) -> float:
        counts = self._count(lines)
        loss = -sum(n * math.log((self.counts[token] + 1) / self.total) for token, n in counts.items())
        return math.exp(loss / counts.total())

    def _count(self, lines: Iterable[str]) -> Counter[str]:
        counts: Counter[str] = Counter()
        for line in lines:
            counts.update(line.split())
            counts["</s>"] += 1
        for token in counts.keys() - self.types:
            counts["<unk>"] += counts.pop(token)
        return counts


def read_vocabulary(path: Path) -> list[str]:
    """The words of a fairseq dictionary."""
    with path.open(encoding="utf-8") as file:
        words = [line.rstrip("\n").rpartition(" ")[0] for line in file]
    return [word for word in words if not word.startswith("madeupword")]


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


if __name__ == "__main__":
    sys.exit(main())
