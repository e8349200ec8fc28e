#!/usr/bin/env bash
# Table 2, 400M, MHA, E_io transferred: LAMBADA 47.23, average of six 46.12 in the paper.
exec bash "$(dirname "$0")/../row.sh" 400m \
    --arch fast_weight_lm_pythia_410m --softmax-attention-layers all \
    --transfer embeddings,output -- "$@"
