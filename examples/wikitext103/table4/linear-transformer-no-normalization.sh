#!/usr/bin/env bash
# Table 4 of the first version, Linear Transformer without attention normalisation: perplexity 1600 (valid and test).
exec bash "$(dirname "$0")/../row.sh" medium carried \
    --update-rule sum --feature-map elu --normalization sum --no-token-positional-embeddings -- "$@"
