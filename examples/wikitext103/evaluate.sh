#!/usr/bin/env bash
# Scores a trained model on the validation and the test set.
#
#   evaluate.sh MODE LENGTH DATA OUT [OPTION ...]
#
# MODE    sliding   a window of LENGTH tokens that moves on by one token, the only one of it that is scored
#         carried   segments of LENGTH tokens, each starting with the state that the one before left
#         context-N windows of LENGTH tokens of which the first N are only read, but for the text's first window;
#                   context-0: segments of LENGTH tokens, each by itself
# LENGTH  256 for the small models, 384 for the medium ones, 512 for those of mao-table3/
# DATA    WikiText-103 as prepare.sh leaves it
# OUT     the folder of the model: checkpoint_best.pt is read, MODE-valid.log and MODE-test.log are written; of another
#         checkpoint, as checkpoint_last.pt, they are MODE-valid.checkpoint_last.log and MODE-test.checkpoint_last.log
# OPTION  of fairseq-eval-lm (--fp16, --max-tokens N for the size of batches, ...)
#
# In the environment: CHECKPOINT (default checkpoint_best.pt), the name in OUT of what is scored; SPLITS (default
# "valid test"), on what.
#
# A log that is there already stands for an evaluation that is done, and is kept, unless the checkpoint is newer.
set -euo pipefail

here=$(dirname "$0")
# shellcheck source=examples/common/scripts.sh
. "$here/../common/scripts.sh"

[ $# -ge 4 ] || usage
mode=$1 length=$2 data=$3 out=$4
shift 4
check_positive LENGTH "$length"
case $mode in
    sliding) flags=(--context-window $((length - 1))) ;;
    carried) flags=(--carry-over-state) ;;
    context-*)
        context=${mode#context-}
        [[ $context =~ ^(0|[1-9][0-9]*)$ ]] && [ "$context" -lt "$length" ] ||
            die "MODE is $mode; it must be context-N, N a number below LENGTH, $length"
        flags=(--context-window "$context")
        ;;
    *) die "MODE is $mode; it must be sliding, carried or context-N" ;;
esac
[ -e "$data/dict.txt" ] || die "DATA is $data, which holds no dict.txt; prepare.sh makes it"
checkpoint=${CHECKPOINT:-checkpoint_best.pt}
[[ $checkpoint != */* ]] || die "CHECKPOINT is $checkpoint; it must be the name of a file in OUT"
[ -e "$out/$checkpoint" ] || die "OUT is $out, which holds no $checkpoint"

of=.${checkpoint%.pt}
[ "$checkpoint" != checkpoint_best.pt ] || of=

for split in ${SPLITS:-valid test}; do
    log=$out/$mode-$split$of.log
    if [ "$out/$checkpoint" -nt "$log" ]; then # or there is no log
        echo "$out: scoring $split, $mode"
        # One process: with several, fairseq reports the perplexity of each one's share.
        fairseq-eval-lm "$data" --path "$out/$checkpoint" --gen-subset "$split" \
            --user-dir fairseq_fastweights --task fast_weight_language_modeling \
            --tokens-per-sample "$length" "${flags[@]}" --distributed-world-size 1 --no-progress-bar "$@" \
            > "$log.unfinished" 2>&1 || {
            tail -n 3 "$log.unfinished" >&2
            die "scoring failed; $log.unfinished says more"
        }
        mv "$log.unfinished" "$log"
    fi
    echo "$out: $split, $mode: $(grep -o 'Perplexity: .*' "$log" || echo 'no perplexity; delete the log and run again')"
done
