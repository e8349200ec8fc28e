#!/usr/bin/env bash
# Table 1, DPFP, nu = 4 (512 features): BLEU 26.2 (valid), 27.1 (test) in the paper.
exec bash "$(dirname "$0")/../row.sh" \
    --fast-weight-attention encoder,decoder,cross --update-rule sum --normalization attention \
    --feature-map dpfp --dpfp-nu 4 -- "$@"
