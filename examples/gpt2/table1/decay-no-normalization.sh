#!/usr/bin/env bash
# Table 1, decay rule, no normalisation: perplexity 18.8 in the paper.
exec bash "$(dirname "$0")/../row.sh" \
    --update-rule decay --feature-map relu --normalization none --feature-dim 4 -- "$@"
