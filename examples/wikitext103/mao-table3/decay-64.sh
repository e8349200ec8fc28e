#!/usr/bin/env bash
# Mao 2022, Table 3, Decay, m = 64: test perplexity 21.9 (context 0), 20.5 (480) in the paper.
exec bash "$(dirname "$0")/../mao-row.sh" 64 -- "$@"
