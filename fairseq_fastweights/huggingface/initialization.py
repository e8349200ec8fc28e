"""The initial values of new weights: from fairseq's distributions, or from one normal distribution."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import nn

from fairseq_fastweights.adaptive_softmax import start_as_identity
from fairseq_fastweights.huggingface.vocabulary import AdaptiveInput, AdaptiveSoftmax
from fairseq_fastweights.layers import draw_normal
from fairseq_fastweights.mixers.feature_maps import FavorMap
from fairseq_fastweights.mixers.mixer import Mixer


def draw_weights(module: nn.Module, std: float | None, padding_idx: int | None, identity: bool = False) -> None:
    """Draws the weights of a module that were not loaded, after those of its submodules.

    Args:
        module: a module of a model.
        std: of the normal distribution of projections and embeddings; None for fairseq's distributions.
        padding_idx: the row of embeddings that is zero.
        identity: whether projections of clusters that change no size start as the identity.
    """
    with _loaded_stay(module):
        # transformers calls this for submodules first: a mixer's own initial values come last.
        if isinstance(module, Mixer):
            _draw_mixer(module, std)
        elif isinstance(module, nn.Embedding):
            draw_normal(module, module.embedding_dim**-0.5 if std is None else std)
        elif isinstance(module, nn.Linear) and std is not None:
            draw_normal(module, std)
        elif isinstance(module, (AdaptiveInput, AdaptiveSoftmax)):
            if std is None:
                _draw_clusters(module, padding_idx)
            for part in module.modules():
                if isinstance(bias := getattr(part, "bias", None), nn.Parameter):
                    nn.init.zeros_(bias)
            if identity:
                start_as_identity(**{"embeddings" if isinstance(module, AdaptiveInput) else "softmax": module})
        else:
            _reset(module)


def _draw_mixer(mixer: Mixer, std: float | None) -> None:
    parts = list(mixer.modules())
    for part in parts:
        if isinstance(part, FavorMap):
            part.features.copy_(part.draw(device=part.features.device))
    _reset(mixer)
    if std is not None:
        for part in parts:
            draw_normal(part, std)
    mixer.reset_special_parameters()


def _draw_clusters(module: nn.Module, padding_idx: int | None) -> None:
    """Draws clusters as fairseq does, in each of which the row of padding is zero."""
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            if padding_idx is not None and padding_idx < part.num_embeddings:
                nn.init.zeros_(part.weight[padding_idx])
        elif isinstance(weight := getattr(part, "weight", None), nn.Parameter):
            nn.init.xavier_uniform_(weight)


def _reset(module: Any) -> None:
    """Calls the module's own `reset_parameters`, if it has one."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


@contextmanager
def _loaded_stay(module: nn.Module) -> Iterator[None]:
    """Restores, at the end, the weights of the module that transformers has loaded."""
    tensors = chain(module.parameters(), module.buffers())
    loaded = [(x, x.clone()) for x in tensors if getattr(x, "_is_hf_initialized", False)]
    yield
    for x, before in loaded:
        x.copy_(before)
