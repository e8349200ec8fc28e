#!/usr/bin/env bash
# Table 1, gated rule, no normalisation: perplexity 19.7 in the paper.
exec bash "$(dirname "$0")/../row.sh" \
    --update-rule gated --feature-map relu --normalization none --feature-dim 4 -- "$@"
