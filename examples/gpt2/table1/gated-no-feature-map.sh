#!/usr/bin/env bash
# Table 1, gated rule, no feature map: perplexity 17.1 in the paper.
exec bash "$(dirname "$0")/../row.sh" \
    --update-rule gated --feature-map identity --normalization none --feature-dim 4 -- "$@"
