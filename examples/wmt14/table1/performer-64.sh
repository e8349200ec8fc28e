#!/usr/bin/env bash
# Table 1, Performer, m = 32 (64 features): BLEU 24.2 (valid), 24.4 (test) in the paper.
exec bash "$(dirname "$0")/../row.sh" \
    --fast-weight-attention encoder,decoder,cross --update-rule sum --normalization attention \
    --feature-map favor --favor-features 32 -- "$@"
