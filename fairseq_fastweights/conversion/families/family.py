"""How a Hugging Face model is read as a `fast_weight_lm`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from fairseq.data import Dictionary

from fairseq_fastweights.conversion.families.config_values import Settings
from fairseq_fastweights.conversion.families.weights import Weight


@dataclass(frozen=True)
class Family:
    """How a model of one family is read.

    Args:
        options: of `fast_weight_lm`, without dashes; True for flags.
        weights: all weights of the source, without buffers.
        vocabulary: number of word types, with those that only pad the embeddings.
        end_of_text: number of the word type that ends a text.
        byte_level: whether its tokenizer may have vocab.json and merges.txt, as GPT-2's, without tokenizer.json.
        tied: whether the output layer shares the weights of the embeddings.
        output_name: the output layer's name in the source.
        input_name: the embeddings' name in the source.
    """

    options: dict[str, Any]
    weights: list[Weight]
    vocabulary: int
    end_of_text: int
    byte_level: bool
    tied: bool
    output_name: str
    input_name: str

    def flags(self, without: tuple[str, ...] = ()) -> list[str]:
        """The options as words of a command, except those named in `without`."""
        said = {name: value for name, value in self.options.items() if value is not False and name not in without}
        return [f"--{name}" if value is True else f"--{name}={value}" for name, value in said.items()]

    def words(self) -> list[str]:
        """The dictionary's words after the special ones: the source's numbers, without that of the end of text."""
        return [str(i) for i in range(self.vocabulary) if i != self.end_of_text]

    def dictionary(self) -> Dictionary:
        dictionary = Dictionary()
        for word in self.words():
            dictionary.add_symbol(word)
        return dictionary

    def shapes_of_ours(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of the converted model's weights, computed without allocating them."""
        shapes: dict[str, tuple[int, ...]] = {}
        for weight in self.weights:
            parts = weight.split(tuple(torch.empty(shape, device="meta") for shape in weight.shapes.values()))
            shapes |= {name: tuple(part.shape) for name, part in zip(weight.ours, parts, strict=True)}
        return shapes


Reader = Callable[[dict[str, Any], set[str], int | None], Family]
"""Called with the contents of config.json, the weights' names, and the default of the end-of-text number."""

FAMILIES: dict[str, Reader] = {}
"""How models are read, by their model_type."""

SERVED: list[str] = []
"""Those that `to-huggingface --as` writes any model as that fits."""


def reads(model_type: str, settings: Settings, *, served: bool = False) -> Callable[[Reader], Reader]:
    """Enters a function into `FAMILIES`, and its models into `SERVED`; it gets all of the `settings` that it reads."""

    def enter(reader: Reader) -> Reader:
        @wraps(reader)
        def read(config: dict[str, Any], names: set[str], end_of_text: int | None) -> Family:
            return reader(settings.complete(config, model_type), names, end_of_text)

        FAMILIES[model_type] = read
        SERVED.extend([model_type] * served)
        return read

    return enter
