#!/usr/bin/env bash
# Table 1, softmax Transformer: BLEU 26.6 (valid), 27.7 (test) in the paper.
exec bash "$(dirname "$0")/../row.sh" \
    --fast-weight-attention none -- "$@"
