#!/usr/bin/env bash
# The target model: GPT-2 with its softmax attention, fine-tuned on the text. All other rows start from it.
exec bash "$(dirname "$0")/row.sh" --softmax-attention-layers all -- "$@"
