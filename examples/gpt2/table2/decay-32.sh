#!/usr/bin/env bash
# Table 2, decay rule, m = 32: perplexity 14.6 in the paper.
exec bash "$(dirname "$0")/../row.sh" \
    --update-rule decay --feature-map identity --normalization none --feature-dim 32 -- "$@"
