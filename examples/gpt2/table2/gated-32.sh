#!/usr/bin/env bash
# Table 2, gated rule, m = 32: perplexity 16.4 in the paper.
exec bash "$(dirname "$0")/../row.sh" \
    --update-rule gated --feature-map identity --normalization none --feature-dim 32 -- "$@"
