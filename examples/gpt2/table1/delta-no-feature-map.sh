#!/usr/bin/env bash
# Table 1, delta rule, no feature map: diverges in the paper. With sum normalisation (footnote 3).
exec bash "$(dirname "$0")/../row.sh" \
    --update-rule delta --feature-map identity --normalization sum --feature-dim 4 -- "$@"
