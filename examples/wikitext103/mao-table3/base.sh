#!/usr/bin/env bash
# Mao 2022, Table 3, Base, the checkpoint of Baevski and Auli as it is: test perplexity 20.5 (context 0), 19.0 (480) in
# the paper. Its "train" trains nothing: it checks SOURCE and its dictionary against DATA, and copies it to OUT.
exec bash "$(dirname "$0")/../mao-row.sh" base -- "$@"
