"""The trainings of benchmarks/training.py: parts, which are sizes of models, their runs, and random text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from fairseq.data import Dictionary, indexed_dataset

LINE = 1000  # tokens of a line of text, with its end
SOURCE, TARGET = "en", "de"
SOFTMAX = "softmax"
PLUGIN, COMPILED, REPLAYED = "plugin", "plugin, compiled", "plugin, compiled and replayed"
STOCK, PLAIN, FLA = "stock", "plain PyTorch", "plain PyTorch, fla"
IMPLEMENTATIONS = (PLUGIN, COMPILED, REPLAYED, STOCK, PLAIN, FLA)

# Options for an architecture of language models. FAVOR+ and DPFP write by the delta rule, as in Table 5 of Schlag et
# al. (2021).
_MAPPED = "--update-rule delta --normalization sum --feature-map"
MODELS = {
    SOFTMAX: "--softmax-attention-layers all",
    **{rule: f"--update-rule {rule}" for rule in ("delta", "decay", "gated", "sum")},
    **{f"dpfp-{nu}": f"{_MAPPED} dpfp --dpfp-nu {nu}" for nu in (1, 2, 3)},
    "favor": f"{_MAPPED} favor-schlag --favor-features 16",
    **{mixer: f"--mixers {mixer}" for mixer in ("gated-delta", "mamba")},
    "decay-32": "--update-rule decay --feature-map identity --normalization none --feature-dim 32",
}
_EVERYWHERE = "--fast-weight-attention encoder,decoder,cross --update-rule sum --normalization attention"
TRANSLATORS = {
    SOFTMAX: "--fast-weight-attention none",
    "dpfp-2": f"{_EVERYWHERE} --feature-map dpfp --dpfp-nu 2",
}
NAMES = tuple(dict.fromkeys([*MODELS, *TRANSLATORS]))

_ADAPTIVE = "--criterion adaptive_loss --ddp-backend legacy_ddp"
_QUICK_LAYERS = """--decoder-layers 1 --decoder-embed-dim 16 --decoder-ffn-embed-dim 16
    --decoder-attention-heads 2"""
_QUICK_SIZES = f"{_QUICK_LAYERS} --decoder-input-dim 16 --decoder-output-dim 16"
_QUICK_BANDS = f"{_QUICK_SIZES} --adaptive-input-cutoff 10,20 --adaptive-softmax-cutoff 10,20"
_QUICK_PAIRS = f"{_QUICK_LAYERS} {_QUICK_LAYERS.replace('decoder', 'encoder')}"


@dataclass(frozen=True)
class Part:
    """A size of models, with its batch."""

    flags: str  # of fairseq-train, for all models
    batch: int  # rows of a batch; of translations, the batches of an update
    length: int  # tokens of a row; of translations, those of a batch
    types: int  # entries of the vocabulary
    runs: Sequence[tuple[str, str]]  # model and implementation of each
    memory: int  # GiB of a GPU for a training, at most: a guess, which limits those that get ready at a time
    others: Sequence[tuple[str, str]] = ()  # these come after the runs of all parts
    quick: str = _QUICK_BANDS  # flags that make it tiny
    translates: bool = False

    def prepare(self, folder: Path, updates: int, quick: bool) -> Path:
        """Writes text for so many updates; returns the folder of fairseq's data."""
        types = 50 if quick else self.types
        if self.translates:
            length = 5 if quick else 28  # tokens of a sentence
            batch = 200 if quick else self.batch * self.length
            return write_pairs(folder, types, 1 + updates * batch // length, length)
        return write_text(folder, types, (2 * 16 if quick else self.batch * self.length) * updates)

    def flags_of(self, model: str, implementation: str, backend: str, quick: bool) -> list[str]:
        """Options of fairseq-train for model and batch."""
        # An update of translations adds up `batch` batches of `length` tokens.
        models = TRANSLATORS if self.translates else MODELS
        batch, length = (2, 16) if quick else (self.batch, self.length)
        if self.translates:
            sizes = f"--max-tokens {200 if quick else length} --update-freq {self.batch}"
            sizes += f" --task translation --source-lang {SOURCE} --target-lang {TARGET}"
        else:
            sizes = f"--tokens-per-sample {length} --batch-size {batch} --required-batch-size-multiple 1"
            sizes += " --task fast_weight_language_modeling"
        fast = "" if model == SOFTMAX else f"--fast-weight-backend {backend}"
        # --compile alone would replay only where it can; with --cuda-graphs it is an error where it cannot.
        ways = {COMPILED: "--compile --no-cuda-graphs", REPLAYED: "--compile --cuda-graphs", STOCK: "--use-old-adam"}
        how = ways.get(implementation, "")
        return f"{self.flags} {models[model]} {fast} {sizes} {how} {self.quick if quick else ''}".split()


def _each(models: str, *implementations: str) -> list[tuple[str, str]]:
    return [(model, implementation) for implementation in implementations for model in models.split()]


_PEERS = [(SOFTMAX, PLAIN), ("delta", FLA)]
PARTS = {
    "lm-small": Part(
        f"--arch fast_weight_lm_wiki103_small {_ADAPTIVE} --clip-norm 0.25",
        **{"batch": 96, "length": 256, "types": 267_735, "memory": 12},
        runs=[
            *_each("softmax delta", PLUGIN, COMPILED, REPLAYED, STOCK),
            *_PEERS,
            *_each("sum dpfp-1", PLUGIN, REPLAYED),
        ],
        others=[
            *_each("decay gated dpfp-2 dpfp-3 gated-delta mamba", PLUGIN, REPLAYED),
            *_each("favor", PLUGIN, COMPILED),  # it draws random features: no replay
        ],
    ),
    "lm-small-long": Part(
        f"--arch fast_weight_lm_wiki103_small {_ADAPTIVE} --clip-norm 0.25",
        **{"batch": 6, "length": 4096, "types": 267_735, "memory": 12},
        runs=[*_each("delta", PLUGIN, REPLAYED), *_each(SOFTMAX, PLUGIN), *_PEERS],
    ),
    "lm-medium": Part(
        f"--arch fast_weight_lm_wiki103_medium {_ADAPTIVE} --clip-norm 0.25",
        **{"batch": 56, "length": 384, "types": 267_735, "memory": 14},
        runs=[*_each("delta", PLUGIN, REPLAYED, STOCK), *_each(SOFTMAX, REPLAYED), *_PEERS],
    ),
    "baevski": Part(
        f"--arch fast_weight_lm_baevski_wiki103 {_ADAPTIVE} --clip-norm 0.1",
        **{"batch": 26, "length": 512, "types": 267_735, "memory": 24},
        runs=[*_each("decay-32", PLUGIN, REPLAYED), *_each(SOFTMAX, REPLAYED, PLAIN)],
        others=[*_each("decay-32", STOCK), *_each(SOFTMAX, PLUGIN)],
    ),
    # The paper adds up 48 batches of 3,584 tokens; with four the optimiser takes little of the time already.
    "wmt-big": Part(
        "--arch fast_weight_transformer_wmt_en_de_big --share-all-embeddings --clip-norm 0"
        " --criterion label_smoothed_cross_entropy --label-smoothing 0.1 --dropout 0.3",
        **{"batch": 4, "length": 3584, "types": 32_000, "memory": 16},
        runs=[*_each("dpfp-2", PLUGIN, COMPILED), *_each(SOFTMAX, PLUGIN)],
        others=_each("dpfp-2", STOCK),
        quick=_QUICK_PAIRS,
        translates=True,
    ),
    # Near the models of `make demo`, of a size that a CPU trains in turns.
    "demo": Part(
        "--arch fast_weight_lm --decoder-layers 3 --decoder-attention-heads 8 --decoder-embed-dim 128"
        " --decoder-input-dim 128 --decoder-output-dim 128 --decoder-ffn-embed-dim 512"
        " --share-decoder-input-output-embed --no-token-positional-embeddings --dropout 0.2 --clip-norm 0.25",
        **{"batch": 16, "length": 64, "types": 8_000, "memory": 2},
        runs=_each("softmax delta sum", PLUGIN, STOCK),
        quick=_QUICK_SIZES,
    ),
}
ON_CPU = ("demo",)
"""The parts that are measured unless others are named; on a GPU it is all others."""


@dataclass(frozen=True)
class Training:
    """A model of a part, to be trained in one way."""

    part: str
    model: str
    implementation: str
    flags: tuple[str, ...]  # of fairseq-train; the plain loops take their sizes from these
    data: Path  # the folder with the text
    device: str
    precision: str

    def __str__(self) -> str:
        return f"{self.part}, {self.model}, {self.implementation}"


def write_text(folder: Path, types: int, tokens: int, valid: int = 64) -> Path:
    """Random text of exactly so many tokens, line ends included; returns the folder, as fairseq-preprocess leaves it.

    All batches are of one size, and nothing is compiled twice.
    """
    dictionary = _dictionary(types)
    dictionary.save(str(folder / "dict.txt"))
    random = np.random.default_rng(1)  # the same text for all trainings of a part
    for split, size in (("train", tokens), ("valid", valid)):
        lengths = [LINE] * (size // LINE) + [size % LINE] * (size % LINE > 0)
        _write(folder / split, dictionary, random, [length - 1 for length in lengths])
    return folder


def write_pairs(folder: Path, types: int, pairs: int, length: int) -> Path:
    """Pairs of sentences with one dictionary, of `length` tokens on average; returns the folder of fairseq's data."""
    dictionary = _dictionary(types)
    random = np.random.default_rng(1)
    for split, number in (("train", pairs), ("valid", 2)):
        lengths = random.normal(length, length / 3, number).round().clip(length // 4, 3 * length).astype(int)
        for language in (SOURCE, TARGET):
            dictionary.save(str(folder / f"dict.{language}.txt"))
            # The two sides have about the same length, as in a translation.
            sides = (lengths * random.uniform(0.8, 1.2, number)).round().clip(1).astype(int)
            _write(folder / f"{split}.{SOURCE}-{TARGET}.{language}", dictionary, random, sides.tolist())
    return folder


def _dictionary(types: int) -> Dictionary:
    dictionary = Dictionary()
    for i in range(types):
        dictionary.add_symbol(f"w{i}", n=types - i)
    return dictionary


def _write(path: Path, dictionary: Dictionary, random: np.random.Generator, lengths: list[int]) -> None:
    """Writes lines of these numbers of tokens, with an end-of-sentence symbol after each."""
    types = len(dictionary) - dictionary.nspecial
    # Frequencies by Zipf's law, as in a language: an adaptive softmax depends on them.
    sums = np.cumsum(1 / np.arange(1, types + 1))
    drawn = np.searchsorted(sums, random.uniform(0, sums[-1], sum(lengths))).astype(np.int32) + dictionary.nspecial
    builder = indexed_dataset.make_builder(f"{path}.bin", impl="mmap", vocab_size=len(dictionary))
    for line in np.split(drawn, np.cumsum(lengths)[:-1]):
        builder.add_item(torch.from_numpy(np.append(line, np.int32(dictionary.eos()))))
    builder.finalize(f"{path}.idx")
