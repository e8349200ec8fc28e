#!/usr/bin/env bash
# Table 3, position encoding and attention normalisation: perplexity 30.4 (valid), 32.1 (test) in the paper.
exec bash "$(dirname "$0")/../row.sh" medium sliding \
    --update-rule delta --feature-map elu --normalization sum,attention,removal -- "$@"
