#!/usr/bin/env bash
# Table 3, RetNet-430M, E_io + FFN + W_O transferred, Frozen: LAMBADA 33.55, average of six 43.12 in the paper.
exec bash "$(dirname "$0")/../row.sh" 400m \
    --arch fast_weight_lm_retnet_430m \
    --transfer embeddings,output,feed-forward,output-projection \
    --freeze embeddings,output,feed-forward,output-projection -- "$@"
