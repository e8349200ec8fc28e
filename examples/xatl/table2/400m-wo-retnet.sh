#!/usr/bin/env bash
# Table 2, 400M, RetNet, E_io + FFN + W_O transferred: LAMBADA 47.80, average of six 46.96 in the paper.
exec bash "$(dirname "$0")/../row.sh" 400m \
    --arch fast_weight_lm_retnet_430m \
    --transfer embeddings,output,feed-forward,output-projection -- "$@"
