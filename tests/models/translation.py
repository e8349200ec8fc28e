"""Translation models as fairseq's command lines build them, at the sizes of tests, and batches for them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Sequence
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.data.data_utils import collate_tokens
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

from fairseq_fastweights.mixers.feature_maps import FEATURE_MAPS

WORDS = tuple(f"w{i}" for i in range(24))
PAD, EOS = 1, 2
SIZES = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 2), ("attention_heads", 2))}
SIZES |= {"encoder_embed_dim": 16, "encoder_ffn_embed_dim": 32}
PLACES = ("encoder", "decoder", "cross")
SUBSETS = [",".join(chosen) for size in (3, 2, 1) for chosen in combinations(PLACES, size)] + ["none"]
# Copies of weights that fairseq's encoder layers keep for a fused kernel.
FUSED = [f"{name}_{kind}" for name in ("in_proj", "out_proj", "fc1", "fc2") for kind in ("weight", "bias")]
# Not DPFP and ReLU, all of whose features may be small or 0.
POSITIVE = [name for name, kind in FEATURE_MAPS.items() if kind.positive and not kind.may_vanish]
# Of log-probabilities: float32 leaves 2e-6, of which DPFP's small sums make 2e-5. A token read twice costs 1e-3.
SCORES = 5e-5


def build(
    arch: str = "fast_weight_transformer",
    *,
    source: Iterable[str] = WORDS,
    target: Iterable[str] | None = None,
    seed: int = 0,
    **options: Any,
) -> Any:
    """A model of `SIZES` in evaluation mode. Without `target` the dictionary is joined."""
    dictionaries = Dictionary(), Dictionary()
    for dictionary, words in zip(dictionaries, (source, target or ()), strict=True):
        for word in words:
            dictionary.add_symbol(word)
    task = SimpleNamespace(source_dictionary=dictionaries[0], target_dictionary=dictionaries[target is not None])
    args = Namespace(**{**SIZES, **options})
    ARCH_CONFIG_REGISTRY[arch](args)
    torch.manual_seed(seed)
    return ARCH_MODEL_REGISTRY[arch].build_model(args, task).eval()


def with_map(feature_map: str, **options: Any) -> Any:
    """The same, in float64 where the map is one whose sums come near zero: no two ways to round them agree."""
    model = build(feature_map=feature_map, **options)
    model.load_state_dict(model.state_dict())  # in which fairseq switches its fused kernel on
    return model if feature_map in ("auto", *POSITIVE) else model.double()


def sentences(lengths: Sequence[int], words: int = len(WORDS), seed: int = 0) -> list[torch.Tensor]:
    """A sentence of so many tokens with the end; 1 is an empty line."""
    generator, end = torch.Generator().manual_seed(seed), torch.tensor([EOS])
    return [torch.cat([torch.randint(4, 4 + words, (n - 1,), generator=generator), end]) for n in lengths]


def batch(rows: list[torch.Tensor], left_pad: bool = True) -> dict[str, torch.Tensor]:
    """Sources as the translation task gives them to a model: padded on the left."""
    tokens = collate_tokens(rows, PAD, left_pad=left_pad)
    return {"src_tokens": tokens, "src_lengths": tokens.ne(PAD).sum(dim=1)}


def shifted(rows: list[torch.Tensor]) -> torch.Tensor:
    """The decoder's input to say `rows`: the end first, and padding on the right."""
    return collate_tokens(rows, PAD, EOS, move_eos_to_beginning=True)


@torch.no_grad()
def log_probs(model: Any, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The score of every token of one target, in one pass over all of it, with nothing else in the batch."""
    out = model(**batch([source]), prev_output_tokens=shifted([target]))
    return model.get_normalized_probs(out, log_probs=True)[0].gather(-1, target[:, None])[:, 0]
