#!/usr/bin/env bash
# Table 3, position encoding, no attention normalisation: the Delta Network of Table 2, 29.7 (valid), 31.5 (test).
exec bash "$(dirname "$0")/../table2/medium-delta-network.sh" "$@"
