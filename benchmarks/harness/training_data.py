"""Random text for trainings, written as `fairseq-preprocess` leaves it."""

from pathlib import Path

import numpy as np
import torch
from fairseq.data import Dictionary, indexed_dataset

LINE = 1000
"""Words of a line of text, with its end."""
SOURCE, TARGET = "en", "de"


def write_text(folder: Path, types: int, words: int, valid: int = 64) -> Path:
    """Text of that many words, line ends included, of so many types; returns the folder of fairseq's data.

    So all batches can be of one size, and nothing has to be compiled twice.
    """
    dictionary = _dictionary(types)
    dictionary.save(str(folder / "dict.txt"))
    random = np.random.default_rng(1)
    for split, size in (("train", words), ("valid", valid)):
        lengths = [LINE] * (size // LINE) + [size % LINE] * (size % LINE > 0)
        _write(folder / split, dictionary, random, [length - 1 for length in lengths])
    return folder


def write_pairs(folder: Path, types: int, pairs: int, words: int) -> Path:
    """Pairs of sentences with a dictionary in common, of `words` on average; returns the folder of fairseq's data."""
    dictionary = _dictionary(types)
    random = np.random.default_rng(1)
    for split, number in (("train", pairs), ("valid", 2)):
        lengths = random.normal(words, words / 3, number).round().clip(words // 4, 3 * words).astype(int)
        for language in (SOURCE, TARGET):
            dictionary.save(str(folder / f"dict.{language}.txt"))
            # Sides of about one length, as a translation has them.
            sides = (lengths * random.uniform(0.8, 1.2, number)).round().clip(1).astype(int)
            _write(folder / f"{split}.{SOURCE}-{TARGET}.{language}", dictionary, random, sides.tolist())
    return folder


def _dictionary(types: int) -> Dictionary:
    dictionary = Dictionary()
    for i in range(types):
        dictionary.add_symbol(f"w{i}", n=types - i)
    return dictionary


def _write(path: Path, dictionary: Dictionary, random: np.random.Generator, lengths: list[int]) -> None:
    """Lines of these numbers of words, and an end after each."""
    types = len(dictionary) - dictionary.nspecial
    # Word frequencies as in a language: by Zipf's law, without which an adaptive softmax would have no use.
    sums = np.cumsum(1 / np.arange(1, types + 1))
    drawn = np.searchsorted(sums, random.uniform(0, sums[-1], sum(lengths))).astype(np.int32) + dictionary.nspecial
    builder = indexed_dataset.make_builder(f"{path}.bin", impl="mmap", vocab_size=len(dictionary))
    for line in np.split(drawn, np.cumsum(lengths)[:-1]):
        builder.add_item(torch.from_numpy(np.append(line, np.int32(dictionary.eos()))))
    builder.finalize(f"{path}.idx")
