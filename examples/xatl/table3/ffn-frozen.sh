#!/usr/bin/env bash
# Table 3, RetNet-430M, E_io + FFN transferred, Frozen: LAMBADA 39.78, average of six 44.55 in the paper.
exec bash "$(dirname "$0")/../row.sh" 400m \
    --arch fast_weight_lm_retnet_430m \
    --transfer embeddings,output,feed-forward \
    --freeze embeddings,output,feed-forward -- "$@"
