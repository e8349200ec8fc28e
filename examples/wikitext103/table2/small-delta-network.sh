#!/usr/bin/env bash
# Table 2, small, Delta Network: perplexity 34.1 (valid), 35.5 (test) in the paper.
exec bash "$(dirname "$0")/../row.sh" small sliding \
    --update-rule delta --feature-map elu --normalization sum -- "$@"
