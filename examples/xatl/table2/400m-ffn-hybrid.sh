#!/usr/bin/env bash
# Table 2, 400M, Hybrid RetNet, E_io + FFN transferred: LAMBADA 49.29, average of six 47.91 in the paper.
exec bash "$(dirname "$0")/../row.sh" 400m \
    --arch fast_weight_lm_retnet_430m --softmax-attention-layers 2,12 \
    --transfer embeddings,output,feed-forward -- "$@"
