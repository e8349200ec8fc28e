"""Checks of the feature maps' sizes."""

from __future__ import annotations

import math

from fairseq_fastweights.invalid_input import InvalidInput, check_number


def count_favor_features(head_dim: int, feature_dim: int | None, favor_features: int | None) -> int:
    """Counts FAVOR+'s random features, from the options for them and for its output size.

    Raises:
        ValueError: if the two contradict each other, or are sizes that it cannot have.
    """
    if feature_dim is not None and feature_dim % 2:
        raise InvalidInput(
            f"feature_dim is {feature_dim}; for the feature map favor it must be even,"
            " because each random feature gives two outputs"
        )
    if favor_features is not None:
        check_number("favor_features", favor_features, 1, whole=True)
        if feature_dim is not None and feature_dim != 2 * favor_features:
            raise InvalidInput(
                f"feature_dim is {feature_dim}; with favor_features {favor_features}"
                f" it must be {2 * favor_features}, or left out"
            )
        return favor_features
    if feature_dim is not None:
        return feature_dim // 2
    return max(1, round(head_dim * math.log(head_dim)))


def check_dpfp(head_dim: int, feature_dim: int | None, dpfp_nu: int) -> None:
    """Raises a `ValueError` for a nu that DPFP cannot have, or an output size that is not the one of this nu."""
    largest = 2 * head_dim - 1
    if not isinstance(dpfp_nu, int) or not 1 <= dpfp_nu <= largest:
        raise InvalidInput(f"dpfp_nu is {dpfp_nu!r}; for head_dim {head_dim} it must be an integer from 1 to {largest}")
    output_dim = 2 * head_dim * dpfp_nu
    if feature_dim is not None and feature_dim != output_dim:
        raise InvalidInput(
            f"feature_dim is {feature_dim}; the feature map dpfp gives 2 * head_dim * dpfp_nu ="
            f" {output_dim}: choose dpfp_nu for it, or leave feature_dim out"
        )
