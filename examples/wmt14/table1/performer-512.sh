#!/usr/bin/env bash
# Table 1, Performer, m = 256 (512 features): BLEU 26.7 (valid), 27.7 (test) in the paper.
exec bash "$(dirname "$0")/../row.sh" \
    --fast-weight-attention encoder,decoder,cross --update-rule sum --normalization attention \
    --feature-map favor --favor-features 256 -- "$@"
