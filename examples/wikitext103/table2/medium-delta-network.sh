#!/usr/bin/env bash
# Table 2, medium, Delta Network: perplexity 29.7 (valid), 31.5 (test) in the paper.
exec bash "$(dirname "$0")/../row.sh" medium sliding \
    --update-rule delta --feature-map elu --normalization sum -- "$@"
