#!/usr/bin/env bash
# Table 5, DPFP with the sum rule, nu = 1: perplexity 37.7 (valid), 38.8 (test) in the paper.
exec bash "$(dirname "$0")/../row.sh" small sliding \
    --update-rule sum --feature-map dpfp --dpfp-nu 1 --normalization attention -- "$@"
