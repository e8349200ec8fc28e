#!/usr/bin/env bash
# Table 2, 400M, Hybrid RetNet, from scratch: LAMBADA 46.21, average of six 46.60 in the paper.
exec bash "$(dirname "$0")/../row.sh" 400m \
    --arch fast_weight_lm_retnet_430m --softmax-attention-layers 2,12 -- "$@"
