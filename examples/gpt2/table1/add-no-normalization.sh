#!/usr/bin/env bash
# Table 1, add rule, no normalisation: diverges in the paper.
exec bash "$(dirname "$0")/../row.sh" \
    --update-rule sum --feature-map relu --normalization none --feature-dim 4 -- "$@"
