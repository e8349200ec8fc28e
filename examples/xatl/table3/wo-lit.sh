#!/usr/bin/env bash
# Table 3, RetNet-430M, E_io + FFN + W_O transferred, LIT: LAMBADA 45.27, average of six 47.02 in the paper.
# The paper does not say how long an interval is; --unfreeze-interval N after OUT takes another.
exec bash "$(dirname "$0")/../row.sh" 400m \
    --arch fast_weight_lm_retnet_430m \
    --transfer embeddings,output,feed-forward,output-projection \
    --freeze embeddings,output,feed-forward,output-projection \
    --unfreeze-threshold 0.01 --unfreeze-patience 1 --unfreeze-interval 1000 -- "$@"
