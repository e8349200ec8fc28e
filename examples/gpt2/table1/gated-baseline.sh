#!/usr/bin/env bash
# Table 1, gated rule, baseline: diverges in the paper.
exec bash "$(dirname "$0")/../row.sh" \
    --update-rule gated --feature-map relu --normalization attention --feature-dim 4 -- "$@"
