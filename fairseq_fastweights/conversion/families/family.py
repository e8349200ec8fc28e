"""How a Hugging Face model is read as a `fast_weight_lm`: its options, and which weights become which.

Names and shapes of the converted model's weights are those of the model that its options build. A family says which
modules have other names in the folder, and which weights are stored in another form. fairseq's dictionary starts with
<s>, <pad>, </s>, <unk>. </s> is the folder's end-of-text token; the other tokens follow in their order, with their ids
as symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from fairseq.data import Dictionary
from torch import Tensor

from fairseq_fastweights.conversion.files.checkpoints import build_on_meta, configuration
from fairseq_fastweights.conversion.files.weight_files import first_line
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.models import checkpoint_settings
from fairseq_fastweights.models.description import layer_mixers

_EOS, _SPECIAL = 2, 4  # in fairseq's dictionary: the id of </s>, and how many special symbols come before the tokens
EMBEDDINGS, OUTPUT = "decoder.embed_tokens.weight", "decoder.output_projection.weight"


@dataclass(frozen=True)
class Part:
    """Weights of the folder, and the converted model's that hold the same numbers.

    Args:
        theirs: names in the folder.
        ours: names in the converted model.
        split: from the weights of the folder to those of the converted model.
        join: the way back.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    split: Callable[..., Sequence[Tensor]] = lambda *weights: weights
    join: Callable[..., Sequence[Tensor]] = lambda *weights: weights


def stacked(theirs: Sequence[str], ours: str, rows: Sequence[int]) -> Part:
    """Weights with so many rows that are one weight here, one below the other."""
    return Part(tuple(theirs), (ours,), lambda *parts: (torch.cat(parts),), lambda x: x.split(list(rows)))


def unstacked(theirs: str, ours: Sequence[str], rows: Sequence[int]) -> Part:
    """A weight whose parts, of so many rows, are weights of their own here."""
    return Part((theirs,), tuple(ours), lambda x: x.split(list(rows)), lambda *parts: (torch.cat(parts),))


def vocabulary(theirs: str, ours: str, end: int) -> Part:
    """Embeddings; special symbols that the folder lacks get rows of zeros, which the conversion back removes."""
    # (vocabulary, width) -> (4 + vocabulary - 1, width): <s>, <pad>, </s>, <unk>, and all tokens but the end.
    return Part(
        (theirs,),
        (ours,),
        lambda x: (
            torch.cat([x.new_zeros(2, x.shape[1]), x[end, None], x.new_zeros(1, x.shape[1]), x[:end], x[end + 1 :]]),
        ),
        lambda x: (torch.cat([x[_SPECIAL : _SPECIAL + end], x[_EOS, None], x[_SPECIAL + end :]]),),
    )


class Model(NamedTuple):
    """A converted model without numbers.

    Attributes:
        cfg: its configuration.
        parameters: its weights, on the device meta.
        settings: those that its checkpoint records.
    """

    cfg: Any
    parameters: dict[str, Tensor]
    settings: Tensor


@dataclass(frozen=True)
class Family:
    """How a model of one family is read.

    Args:
        options: of `fast_weight_lm`, without dashes; True for flags.
        modules: the names in the folder of the converted model's modules; modules within them have equal names in both.
        parts: weights in another form than here. All others are used as they are.
        vocabulary: size of the vocabulary, with entries that only pad the embeddings.
        end_of_text: id of the token that ends a text.
        byte_level: whether its tokenizer may have vocab.json and merges.txt, as GPT-2's, without tokenizer.json.
        copies: of a tied output layer its name in the folder, which may hold it once more, and that of the embeddings.
    """

    options: dict[str, Any]
    modules: dict[str, str]
    parts: Sequence[Part]
    vocabulary: int
    end_of_text: int
    byte_level: bool
    copies: dict[str, str]

    def flags(self, without: tuple[str, ...] = ()) -> list[str]:
        """The options as words of a command, except those named in `without`."""
        given = {name: value for name, value in self.options.items() if value is not False and name not in without}
        return [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]

    @cached_property
    def dictionary(self) -> Dictionary:
        """fairseq's dictionary: the token ids as symbols, without that of the end of text, which is </s>."""
        dictionary = Dictionary()
        for i in range(self.vocabulary):
            if i != self.end_of_text:
                dictionary.add_symbol(str(i))
        return dictionary

    def with_own_ids(self) -> Family:
        """The family of a folder whose token ids are those of a dictionary of fairseq."""
        return replace(self, parts=[part for part in self.parts if {EMBEDDINGS, OUTPUT}.isdisjoint(part.ours)])

    @cached_property
    def model(self) -> Model:
        """The model that the options build, without numbers."""
        cfg = configuration(self.options)
        try:
            parameters = dict(build_on_meta(cfg, self.dictionary).named_parameters())
        except RuntimeError as error:  # more numbers than torch can count
            raise InvalidInput(f"config.json: a model of these sizes cannot be built ({first_line(error)})") from None
        settings = checkpoint_settings.settings_of(cfg.model, layer_mixers(cfg.model), self.dictionary)
        return Model(cfg, parameters, settings)

    @cached_property
    def weights(self) -> list[Part]:
        """All weights of the folder, without buffers, in the order of the converted model's."""
        parts = {name: part for part in self.parts for name in part.ours}
        for name in self.model.parameters.keys() - parts.keys():
            words = name.split(".")
            starts = (".".join(words[:n]) for n in range(len(words), 0, -1))
            module = next(start for start in starts if start in self.modules)  # the innermost with another name
            parts[name] = Part((self.modules[module] + name.removeprefix(module),), (name,))
        return list(dict.fromkeys(parts[name] for name in self.model.parameters))

    def split(self, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The weights of the converted model; `read` returns a weight of the folder by name."""
        model: dict[str, Tensor] = {}
        for part in self.weights:
            weights = part.split(*map(read, part.theirs))
            model |= {name: x.contiguous().clone() for name, x in zip(part.ours, weights, strict=True)}
        return model

    def join(self, model: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of the folder, without the tied output layer, from those of the converted model."""
        weights: dict[str, Tensor] = {}
        for part in self.weights:
            made = part.join(*(model[name] for name in part.ours))
            weights |= {name: x.contiguous().clone() for name, x in zip(part.theirs, made, strict=True)}
        return weights


def language_model(
    config: Mapping[str, Any],
    end_of_text: int | None,
    options: dict[str, Any],
    modules: dict[str, str],
    layers: Iterable[tuple[str, Mapping[str, str]]],
    parts: Sequence[Part],
    *,
    output: str = "lm_head",
    byte_level: bool = False,
) -> Family:
    """The family of a model with these options beside those that all have.

    Args:
        config: all settings, by the names that most families have.
        end_of_text: the default of the end-of-text token's id.
        options: further options.
        modules: the names in the folder of embeddings and the last norm, after the decoder's names here.
        layers: the name of each layer in the folder, and those of its modules after their names here.
        parts: weights in another form than here.
        output: the name of the output layer.
        byte_level: as of `Family`.
    """
    width, positions = config["hidden_size"], config["max_position_embeddings"]
    tied, end = config["tie_word_embeddings"], config["eos_token_id"]
    if isinstance(end, list) and end:  # models for dialogue have several: the first ends a text
        end = end[0]
    end = end_of_text if end is None else end
    if isinstance(end, bool) or not isinstance(end, int) or not 0 <= end < config["vocab_size"]:
        raise InvalidInput(
            f"config.json: eos_token_id is {end!r}; it must be one number, from 0 to vocab_size - 1, "
            f"{config['vocab_size'] - 1}"
        )
    common = {
        "decoder-layers": config["num_hidden_layers"],
        "decoder-embed-dim": width,
        "decoder-input-dim": width,
        "decoder-output-dim": width,
        "decoder-ffn-embed-dim": config["intermediate_size"],
        "decoder-attention-heads": config["num_attention_heads"],
        "decoder-normalize-before": True,
        "no-scale-embedding": True,
        "share-decoder-input-output-embed": tied,
        "max-target-positions": positions,
        "tokens-per-sample": positions,
        "mask-special-symbols": True,
        "softmax-attention-layers": "all",
    }
    # Models with other mixers name those of all layers, softmax included.
    if "mixers" in options:
        del common["softmax-attention-layers"]
    named = {f"decoder.{own}": name for own, name in {**modules, "output_projection": output}.items()}
    for i, (theirs, own) in enumerate(layers):
        ours = f"decoder.layers.{i}"
        named |= {ours: theirs, **{f"{ours}.{module}": f"{theirs}.{name}" for module, name in own.items()}}
    # A tied output layer is no weight of its own, but files may hold a copy of it.
    rows = {EMBEDDINGS: f"{modules['embed_tokens']}.weight", OUTPUT: f"{output}.weight"}
    copies = {rows.pop(OUTPUT): rows[EMBEDDINGS]} if tied else {}
    parts = [*(vocabulary(theirs, ours, end) for ours, theirs in rows.items()), *parts]
    return Family(common | options, named, parts, config["vocab_size"], end, byte_level, copies)
