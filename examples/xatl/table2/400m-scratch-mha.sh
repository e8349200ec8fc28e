#!/usr/bin/env bash
# Table 2, 400M, MHA, from scratch: LAMBADA 47.43, average of six 45.99 in the paper.
exec bash "$(dirname "$0")/../row.sh" 400m \
    --arch fast_weight_lm_pythia_410m --softmax-attention-layers all -- "$@"
