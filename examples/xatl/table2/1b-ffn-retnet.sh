#!/usr/bin/env bash
# Table 2, 1B, RetNet, E_io + FFN transferred: LAMBADA 51.47, average of six 49.48 in the paper.
exec bash "$(dirname "$0")/../row.sh" 1b \
    --arch fast_weight_lm_retnet_1b \
    --transfer embeddings,output,feed-forward -- "$@"
