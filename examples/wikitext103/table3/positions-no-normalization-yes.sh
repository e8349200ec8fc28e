#!/usr/bin/env bash
# Table 3, attention normalisation, no position encoding: perplexity 29.2 (valid), 31.2 (test) in the paper.
exec bash "$(dirname "$0")/../row.sh" medium sliding \
    --update-rule delta --feature-map elu --normalization sum,attention,removal --no-token-positional-embeddings -- "$@"
