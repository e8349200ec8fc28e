#!/usr/bin/env bash
# Table 1, decay rule, baseline: none in the paper, which has no such run.
# The normaliser decays as the keys of the memory do, z_t = f_t * z_{t-1} + k_t.
exec bash "$(dirname "$0")/../row.sh" \
    --update-rule decay --feature-map relu --normalization attention --feature-dim 4 -- "$@"
