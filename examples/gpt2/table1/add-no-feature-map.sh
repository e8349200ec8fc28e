#!/usr/bin/env bash
# Table 1, add rule, no feature map: perplexity 20.0 in the paper.
exec bash "$(dirname "$0")/../row.sh" \
    --update-rule sum --feature-map identity --normalization none --feature-dim 4 -- "$@"
