#!/usr/bin/env bash
# Table 1, Linear Transformer: BLEU 25.5 (valid), 26.8 (test) in the paper.
exec bash "$(dirname "$0")/../row.sh" \
    --fast-weight-attention encoder,decoder,cross --update-rule sum --normalization attention \
    --feature-map elu -- "$@"
