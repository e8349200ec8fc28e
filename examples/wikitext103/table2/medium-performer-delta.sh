#!/usr/bin/env bash
# Table 2, medium, Performer with the delta rule: perplexity 30.0 (valid), 31.8 (test) in the paper.
exec bash "$(dirname "$0")/../row.sh" medium sliding \
    --update-rule delta --feature-map favor --favor-features 16 --normalization sum -- "$@"
