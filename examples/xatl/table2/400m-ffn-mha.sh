#!/usr/bin/env bash
# Table 2, 400M, MHA, E_io + FFN transferred: LAMBADA 50.38, average of six 47.98 in the paper.
exec bash "$(dirname "$0")/../row.sh" 400m \
    --arch fast_weight_lm_pythia_410m --softmax-attention-layers all \
    --transfer embeddings,output,feed-forward -- "$@"
