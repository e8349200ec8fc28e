#!/usr/bin/env bash
# Table 4, Delta Network: perplexity 27.8 (valid), 29.4 (test) in the paper.
exec bash "$(dirname "$0")/../row.sh" medium carried \
    --update-rule delta --feature-map elu --normalization sum --no-token-positional-embeddings -- "$@"
