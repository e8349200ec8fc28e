#!/usr/bin/env bash
# Prepares text for training with a converted Pythia's subwords, as ../gpt2/prepare.sh does for GPT-2; that does the
# work, and says what is called how.
#
#   prepare.sh OUT SOURCE FOLDER
#
# TRAIN_TOKENS in the environment is what 75,000 updates read unless it says otherwise.
set -euo pipefail

export TRAIN_TOKENS=${TRAIN_TOKENS:-157286400000}
exec bash "$(dirname "$0")/../gpt2/prepare.sh" "$@"
