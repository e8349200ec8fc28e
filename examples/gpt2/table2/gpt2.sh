#!/usr/bin/env bash
# Table 2, GPT-2: perplexity 14.5 in the paper. It is the target model of all other rows.
exec bash "$(dirname "$0")/../target.sh" "$@"
