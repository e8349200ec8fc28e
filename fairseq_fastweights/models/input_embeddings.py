"""The input embeddings of `fast_weight_lm`: of words, of characters, or adaptive, with the softmax that is adaptive."""

from __future__ import annotations

import ast
from typing import Any

from fairseq.data import Dictionary
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.modules import AdaptiveInput, CharacterTokenEmbedder

from fairseq_fastweights.adaptive_softmax import (
    SQUARE_PROJECTIONS,
    add_biases,
    leave_out_square_projections,
    start_as_identity,
)
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.registry import lookup
from fairseq_fastweights.models.option_checks import read_cutoffs


def build_embeddings(args: Any, dictionary: Dictionary) -> Any:
    """Makes the module of input embeddings that fairseq's options choose.

    Raises:
        ValueError: for options that contradict each other.
    """
    _check_bands(args)
    if args.character_embeddings:
        return CharacterTokenEmbedder(
            dictionary,
            _read_filters(args.character_filters),
            args.character_embedding_dim,
            args.decoder_embed_dim,
            args.char_embedder_highway_layers,
        )
    if args.tie_adaptive_weights:
        _check_tied_bands(args)
    if not args.adaptive_input:
        return TransformerLanguageModel.build_embedding(args, dictionary, args.decoder_input_dim)
    cutoffs = read_cutoffs("adaptive_input_cutoff", args.adaptive_input_cutoff, len(dictionary))
    if int(args.decoder_input_dim // args.adaptive_input_factor ** len(cutoffs)) < 1:
        raise InvalidInput(
            f"adaptive_input_factor is {args.adaptive_input_factor:g}: with decoder_input_dim {args.decoder_input_dim} "
            f"and {len(cutoffs)} cut-offs the rarest words' embeddings would have no dimension; it must be at most "
            f"{args.decoder_input_dim ** (1 / len(cutoffs)):.3g}"
        )
    return AdaptiveInput(
        len(dictionary),
        dictionary.pad(),
        args.decoder_input_dim,
        args.adaptive_input_factor,
        args.decoder_embed_dim,
        cutoffs,
        args.quant_noise_pq,
        args.quant_noise_pq_block_size,
    )


def change_bands(args: Any, embeddings: Any, softmax: Any) -> None:
    """Gives an adaptive input and an adaptive softmax, or None, the form that the options choose.

    It is done last: weights that start as the identity must not be drawn again.
    """
    if args.square_projections == "none":
        leave_out_square_projections(embeddings, softmax)
    elif args.square_projections == "identity":
        start_as_identity(embeddings, softmax)
    if args.adaptive_softmax_bias:
        add_biases(softmax)


def _check_bands(args: Any) -> None:
    lookup("square_projections", args.square_projections, dict.fromkeys(SQUARE_PROJECTIONS))
    adaptive_input = args.adaptive_input and not args.character_embeddings
    if args.square_projections != "keep" and not adaptive_input and args.adaptive_softmax_cutoff is None:
        raise InvalidInput(
            f"square_projections is {args.square_projections}; it needs adaptive_input or adaptive_softmax_cutoff, "
            "which are not set"
        )
    if args.adaptive_softmax_bias and args.adaptive_softmax_cutoff is None:
        raise InvalidInput("adaptive_softmax_bias is set; it needs adaptive_softmax_cutoff, which is not")


def _read_filters(text: str) -> list[Any]:
    """Reads --character-filters, a Python list of pairs."""
    try:
        filters = [(int(width), int(number)) for width, number in ast.literal_eval(text)]
    except (TypeError, ValueError, SyntaxError):
        filters = []
    if not filters or not all(width > 0 and number > 0 for width, number in filters):
        raise InvalidInput(
            f"character_filters is {text!r}; it must be a list of pairs of widths and numbers of filters"
        )
    return filters


def _check_tied_bands(args: Any) -> None:
    if not args.adaptive_input:
        raise InvalidInput("tie_adaptive_weights is set; it needs adaptive_input, which is not")
    for name, own, other in (
        ("adaptive_softmax_factor", args.adaptive_softmax_factor, args.adaptive_input_factor),
        ("adaptive_softmax_cutoff", args.adaptive_softmax_cutoff, args.adaptive_input_cutoff),
        ("decoder_output_dim", args.decoder_output_dim, args.decoder_input_dim),
    ):
        if own != other:
            raise InvalidInput(f"{name} is {own!r}; with tie_adaptive_weights it must be that of the input, {other!r}")
