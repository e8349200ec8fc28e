#!/usr/bin/env bash
# Table 2, medium, Performer with the sum rule: perplexity 32.2 (valid), 33.8 (test) in the paper.
exec bash "$(dirname "$0")/../row.sh" medium sliding \
    --update-rule sum --feature-map favor --favor-features 16 --normalization attention -- "$@"
