#!/usr/bin/env bash
# Table 1, Performer, m = 128 (256 features): BLEU 24.9 (valid), 25.3 (test) in the paper.
exec bash "$(dirname "$0")/../row.sh" \
    --fast-weight-attention encoder,decoder,cross --update-rule sum --normalization attention \
    --feature-map favor --favor-features 128 -- "$@"
