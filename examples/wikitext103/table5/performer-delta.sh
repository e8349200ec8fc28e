#!/usr/bin/env bash
# Table 5, Performer with the delta rule, m = 16: perplexity 36.0 (valid), 37.0 (test) in the paper.
exec bash "$(dirname "$0")/../row.sh" small sliding \
    --update-rule delta --feature-map favor --favor-features 16 --normalization sum -- "$@"
