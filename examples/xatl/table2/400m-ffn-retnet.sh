#!/usr/bin/env bash
# Table 2, 400M, RetNet, E_io + FFN transferred: LAMBADA 48.81, average of six 47.20 in the paper.
exec bash "$(dirname "$0")/../row.sh" 400m \
    --arch fast_weight_lm_retnet_430m \
    --transfer embeddings,output,feed-forward -- "$@"
