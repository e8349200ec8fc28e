#!/usr/bin/env bash
# Table 1, delta rule, baseline: perplexity 21.6 in the paper. It has sum normalisation besides (footnote 3).
exec bash "$(dirname "$0")/../row.sh" \
    --update-rule delta --feature-map relu --normalization sum,attention --feature-dim 4 -- "$@"
