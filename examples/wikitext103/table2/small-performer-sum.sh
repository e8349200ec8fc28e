#!/usr/bin/env bash
# Table 2, small, Performer with the sum rule: perplexity 39.0 (valid), 39.6 (test) in the paper.
exec bash "$(dirname "$0")/../row.sh" small sliding \
    --update-rule sum --feature-map favor --favor-features 8 --normalization attention -- "$@"
