#!/usr/bin/env bash
# Table 2, 1B, Hybrid RetNet, E_io + FFN + ATTN transferred: LAMBADA 53.66, average of six 50.76 in the paper.
exec bash "$(dirname "$0")/../row.sh" 1b \
    --arch fast_weight_lm_retnet_1b --softmax-attention-layers 2,8 \
    --transfer embeddings,output,feed-forward,attention -- "$@"
