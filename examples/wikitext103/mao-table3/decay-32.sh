#!/usr/bin/env bash
# Mao 2022, Table 3, Decay, m = 32: test perplexity 22.1 (context 0), 20.7 (480) in the paper.
exec bash "$(dirname "$0")/../mao-row.sh" 32 -- "$@"
