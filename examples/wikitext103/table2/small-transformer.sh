#!/usr/bin/env bash
# Table 2, small, Transformer: perplexity 33.0 (valid), 34.1 (test) in the paper.
exec bash "$(dirname "$0")/../row.sh" small sliding \
    --softmax-attention-layers all -- "$@"
