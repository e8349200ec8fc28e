"""How a Hugging Face model is read as a `fast_weight_lm`: its options, and which weights become which."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from fairseq.data import Dictionary
from torch import Tensor

from fairseq_fastweights.conversion.families.settings import Settings, read_end_of_text

_EOS, _SPECIAL = 2, 4  # in fairseq's dictionary: the id of </s>, and how many special symbols come before the tokens


@dataclass(frozen=True)
class Weight:
    """Weights of the folder that belong together, with their shapes, and the converted model's that hold the same."""

    shapes: dict[str, tuple[int, ...]]
    ours: tuple[str, ...]
    split: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
    join: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]


def single(
    name: str,
    shape: tuple[int, ...],
    ours: tuple[str, ...],
    split: Callable[[Tensor], tuple[Tensor, ...]],
    join: Callable[[tuple[Tensor, ...]], Tensor],
) -> Weight:
    """One weight of the folder."""
    return Weight({name: shape}, ours, lambda x: split(x[0]), lambda parts: (join(parts),))


def plain(name: str, ours: str, *shape: int) -> Weight:
    """A weight that is used as it is."""
    return Weight({name: shape}, (ours,), tuple, tuple)


def same(theirs: str, ours: str, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Weight]:
    """Weights that are used as they are, with the same names after two prefixes."""
    return (plain(f"{theirs}{name}", f"{ours}{name}", *shape) for name, shape in shapes.items())


def stacked(names: tuple[str, ...], ours: str, rows: tuple[int, ...], *shape: int) -> Weight:
    """Weights with so many rows that are one weight here, one below the other."""
    shapes = {name: (n, *shape) for name, n in zip(names, rows, strict=True)}
    return Weight(shapes, (ours,), lambda x: (torch.cat(x),), lambda parts: parts[0].split(rows))


def unstacked(name: str, ours: tuple[str, ...], rows: tuple[int, ...], *shape: int) -> Weight:
    """A weight whose parts, of so many rows, are weights of their own here."""
    return single(name, (sum(rows), *shape), ours, lambda x: x.split(rows), torch.cat)


@dataclass(frozen=True)
class Family:
    """How a model of one family is read.

    Args:
        options: of `fast_weight_lm`, without dashes; True for flags.
        weights: all weights of the folder, without buffers.
        vocabulary: size of the vocabulary, with entries that only pad the embeddings.
        end_of_text: id of the token that ends a text.
        byte_level: whether its tokenizer may have vocab.json and merges.txt, as GPT-2's, without tokenizer.json.
        tied: whether the output layer shares the weights of the embeddings.
        output_name: the output layer's name in the folder.
        input_name: the embeddings' name in the folder.
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
        given = {name: value for name, value in self.options.items() if value is not False and name not in without}
        return [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]

    def dictionary(self) -> Dictionary:
        """fairseq's dictionary: the token ids as symbols, without that of the end of text, which is </s>."""
        dictionary = Dictionary()
        for i in range(self.vocabulary):
            if i != self.end_of_text:
                dictionary.add_symbol(str(i))
        return dictionary

    def shapes_of_ours(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of the converted model's weights, computed without allocating them."""
        shapes = {name: shape for weight in self.weights for name, shape in weight.shapes.items()}
        made = self.split(lambda name: torch.empty(shapes[name], device="meta"))
        return {name: tuple(weight.shape) for name, weight in made.items()}

    def split(self, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The weights of the converted model; `read` returns a weight of the folder by name."""
        model: dict[str, Tensor] = {}
        for weight in self.weights:
            parts = weight.split(tuple(map(read, weight.shapes)))
            model |= {name: part.contiguous().clone() for name, part in zip(weight.ours, parts, strict=True)}
        return model

    def join(self, model: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of the folder, without the tied output layer, from those of the converted model."""
        weights: dict[str, Tensor] = {}
        for weight in self.weights:
            parts = weight.join(tuple(model[name] for name in weight.ours))
            weights |= {name: part.contiguous().clone() for name, part in zip(weight.shapes, parts, strict=True)}
        return weights


@dataclass(frozen=True)
class Sizes:
    """The settings that all families have."""

    width: int
    between: int
    heads: int
    layers: int
    positions: int
    vocabulary: int
    tied: bool
    end: int

    def family(
        self,
        weights: Iterable[Weight],
        options: dict[str, Any],
        *,
        input_name: str,
        output_name: str = "lm_head.weight",
        byte_level: bool = False,
    ) -> Family:
        """The family of a model with these weights beside embeddings and output layer, and these further options."""
        weights = [self._embedding(input_name, "decoder.embed_tokens.weight"), *weights]
        if not self.tied:
            weights.append(self._embedding(output_name, "decoder.output_projection.weight"))
        common = {
            "decoder-layers": self.layers,
            "decoder-embed-dim": self.width,
            "decoder-input-dim": self.width,
            "decoder-output-dim": self.width,
            "decoder-ffn-embed-dim": self.between,
            "decoder-attention-heads": self.heads,
            "decoder-normalize-before": True,
            "no-scale-embedding": True,
            "share-decoder-input-output-embed": self.tied,
            "max-target-positions": self.positions,
            "tokens-per-sample": self.positions,
            "mask-special-symbols": True,
            "softmax-attention-layers": "all",
        }
        # Models with other mixers name those of all layers, softmax included.
        if "mixers" in options:
            del common["softmax-attention-layers"]
        return Family(
            common | options, weights, self.vocabulary, self.end, byte_level, self.tied, output_name, input_name
        )

    def _embedding(self, name: str, ours: str) -> Weight:
        """Embeddings; special symbols that the folder lacks get rows of zeros, which the conversion back removes."""
        end = self.end

        def split(x: Tensor) -> tuple[Tensor, ...]:
            # (vocabulary, width) -> (4 + vocabulary - 1, width): <s>, <pad>, </s>, <unk>, and all tokens but the end.
            none = x.new_zeros(1, self.width)
            return (torch.cat([none, none, x[end : end + 1], none, x[:end], x[end + 1 :]]),)

        def join(parts: tuple[Tensor, ...]) -> Tensor:
            tokens = parts[0][_SPECIAL:]
            return torch.cat([tokens[:end], parts[0][_EOS : _EOS + 1], tokens[end:]])

        return single(name, (self.vocabulary, self.width), (ours,), split, join)


def read_sizes(
    config: Mapping[str, Any],
    end_of_text: int | None,
    *,
    width: str = "hidden_size",
    between: str = "intermediate_size",
    heads: str = "num_attention_heads",
    layers: str = "num_hidden_layers",
    positions: str = "max_position_embeddings",
) -> Sizes:
    """Reads them from settings of these names. Raises a `ValueError` for a setting that is missing or not allowed."""
    vocabulary = config["vocab_size"]
    numbers = (config[width], config[between], config[heads], config[layers], config[positions], vocabulary)
    return Sizes(*numbers, config["tie_word_embeddings"], read_end_of_text(config, vocabulary, end_of_text))


Reader = Callable[[dict[str, Any], set[str], int | None], Family]
"""Called with the contents of config.json, the weights' names, and the default of the end-of-text token's id."""

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
