#!/usr/bin/env bash
# Table 5, Performer with the sum rule, m = 16: perplexity 38.0 (valid), 38.8 (test) in the paper.
exec bash "$(dirname "$0")/../row.sh" small sliding \
    --update-rule sum --feature-map favor --favor-features 16 --normalization attention -- "$@"
