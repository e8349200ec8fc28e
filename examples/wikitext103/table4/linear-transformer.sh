#!/usr/bin/env bash
# Table 4, Linear Transformer: perplexity above 260 (valid and test) in the paper.
exec bash "$(dirname "$0")/../row.sh" medium carried \
    --update-rule sum --feature-map elu --normalization attention --no-token-positional-embeddings -- "$@"
