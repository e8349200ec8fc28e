#!/usr/bin/env bash
# Table 2, 1B, RetNet, from scratch: LAMBADA 49.30, average of six 48.18 in the paper.
exec bash "$(dirname "$0")/../row.sh" 1b \
    --arch fast_weight_lm_retnet_1b -- "$@"
