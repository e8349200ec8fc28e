#!/usr/bin/env bash
# Table 1, delta rule, no normalisation: perplexity 20.1 in the paper.
# Without sum normalisation it diverges (footnote 3).
exec bash "$(dirname "$0")/../row.sh" \
    --update-rule delta --feature-map relu --normalization sum --feature-dim 4 -- "$@"
