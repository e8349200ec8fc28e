#!/usr/bin/env bash
# Table 5, DPFP with the delta rule, nu = 1: perplexity 33.9 (valid), 35.0 (test) in the paper.
exec bash "$(dirname "$0")/../row.sh" small sliding \
    --update-rule delta --feature-map dpfp --dpfp-nu 1 --normalization sum -- "$@"
