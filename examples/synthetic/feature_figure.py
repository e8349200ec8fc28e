"""Figure 1 of Schlag et al. (2021): the features that DPFP makes of two numbers."""

from __future__ import annotations

from pathlib import Path

import torch
from common.figures import BLUE, GREEN, ORANGE, PURPLE, new_figure, save_figure, say
from torch import Tensor

from fairseq_fastweights.mixers.feature_maps import build_feature_map

NAME = "synthetic-figure1.png"
POINTS = 41
"""On each axis, 0 among them."""


def dpfp_surfaces() -> tuple[Tensor, Tensor, Tensor]:
    """The grid of k_1 and k_2 from -1 to 1, (points, points) each, and the features there, (4, points, points).

    They are those of Eq. 33 to 36 in the order of Eq. 37: r(k_1) r(-k_2), r(k_2) r(k_1), r(-k_1) r(k_2) and
    r(-k_2) r(-k_1).
    """
    axis = torch.linspace(-1, 1, POINTS)
    first, second = torch.meshgrid(axis, axis, indexing="xy")
    k = torch.stack([first, second], dim=-1).view(1, -1, 1, 2)
    _, features = build_feature_map("dpfp", num_heads=1, head_dim=2, dpfp_nu=1)(k, k)
    return first, second, features.view(POINTS, POINTS, 4).permute(2, 0, 1)


def draw_features(folder: Path) -> Path:
    """Draws the four surfaces into a PNG file in a folder; returns the file."""
    figure, axes = new_figure(figsize=(6.4, 5.4), subplot_kw={"projection": "3d"})
    first, second, features = dpfp_surfaces()
    for surface, colour in zip(features, (BLUE, ORANGE, GREEN, PURPLE), strict=True):
        shown = surface.masked_fill((surface == 0) & (features != 0).any(dim=0), float("nan"))  # where another is above
        axes.plot_surface(first.numpy(), second.numpy(), shown.numpy(), color=colour, linewidth=0, alpha=0.9)
    axes.set(xlabel="k₁", ylabel="k₂", zlabel="feature", xticks=(-1, 0, 1), yticks=(-1, 0, 1), zticks=(0, 0.5, 1))
    axes.view_init(elev=28, azim=-55)
    message = "DPFP divides the plane: a key of two numbers has one feature of four above zero"
    say(figure, message, "Each colour is a feature of DPFP-1; the other three are 0 there.")
    path = folder / NAME
    save_figure(figure, path)
    return path
