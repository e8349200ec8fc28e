#!/usr/bin/env bash
# Table 2, medium, Linear Transformer: perplexity 31.1 (valid), 33.0 (test) in the paper.
exec bash "$(dirname "$0")/../row.sh" medium sliding \
    --update-rule sum --feature-map elu --normalization attention -- "$@"
