#!/usr/bin/env bash
# Table 2, 400M, RetNet, from scratch: LAMBADA 44.63, average of six 45.25 in the paper.
exec bash "$(dirname "$0")/../row.sh" 400m \
    --arch fast_weight_lm_retnet_430m -- "$@"
