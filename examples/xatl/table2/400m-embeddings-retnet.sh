#!/usr/bin/env bash
# Table 2, 400M, RetNet, E_io transferred: LAMBADA 40.05, average of six 44.94 in the paper.
exec bash "$(dirname "$0")/../row.sh" 400m \
    --arch fast_weight_lm_retnet_430m \
    --transfer embeddings,output -- "$@"
