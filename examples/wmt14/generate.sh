#!/usr/bin/env bash
# Translates the validation and the test set with a trained model, and scores the translations: generate.py says how.
#
#   generate.sh DATA OUT [OPTION ...]
set -euo pipefail

exec python "$(dirname "$0")/generate.py" "$@"
