#!/usr/bin/env bash
# Table 2, small, Performer with the delta rule: perplexity 36.1 (valid), 37.2 (test) in the paper.
exec bash "$(dirname "$0")/../row.sh" small sliding \
    --update-rule delta --feature-map favor --favor-features 8 --normalization sum -- "$@"
