#!/usr/bin/env bash
# Table 2, medium, Transformer: perplexity 27.9 (valid), 29.6 (test) in the paper.
exec bash "$(dirname "$0")/../row.sh" medium sliding \
    --softmax-attention-layers all -- "$@"
