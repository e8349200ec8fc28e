#!/usr/bin/env bash
# Table 3, neither position encoding nor attention normalisation: perplexity 28.1 (valid), 31.1 (test) in the paper.
exec bash "$(dirname "$0")/../row.sh" medium sliding \
    --update-rule delta --feature-map elu --normalization sum --no-token-positional-embeddings -- "$@"
