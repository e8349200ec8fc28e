#!/usr/bin/env bash
# Table 2, small, Linear Transformer: perplexity 37.1 (valid), 38.3 (test) in the paper.
exec bash "$(dirname "$0")/../row.sh" small sliding \
    --update-rule sum --feature-map elu --normalization attention -- "$@"
