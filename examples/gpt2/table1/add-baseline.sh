#!/usr/bin/env bash
# Table 1, add rule, baseline: perplexity 22.6 in the paper.
exec bash "$(dirname "$0")/../row.sh" \
    --update-rule sum --feature-map relu --normalization attention --feature-dim 4 -- "$@"
