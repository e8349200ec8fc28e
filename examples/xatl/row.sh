#!/usr/bin/env bash
# What the rows of Tables 2 and 3 share (Choi 2024, Sec. 4). The script of a row is called as
#
#   ROW.sh train SOURCE DATA OUT [OPTION ...]   trains the model; called again, it goes on where it stopped
#   ROW.sh evaluate DATA OUT [OPTION ...]       scores the validation set in segments of 2048
#
# SOURCE  the converted Pythia of the row's size. A row from scratch takes nothing of it but its subwords
# DATA    text as prepare.sh leaves it
# OUT     where checkpoints and logs of this model go
# OPTION  of fairseq-train (--seed 2, --unfreeze-interval 500, ...) or fairseq-eval-lm; it overrides what the scripts
#         set
#
# In the environment, with their defaults:
#
#   GPUS=1          that train
#   UPDATE_FREQ=1   batches that each of them adds up for one update; the paper's batch is divided among them
#   PRECISION=bf16  of the training; or fp16, fp32
#
# It calls this one: row.sh SIZE MODEL-OPTION ... -- train|evaluate ...
set -euo pipefail

here=$(dirname "$0")
# shellcheck source=examples/common/scripts.sh
. "$here/../common/scripts.sh"

[ $# -ge 1 ] || usage
size=$1
shift
row=() transfers=
while [ "${1:---}" != -- ]; do
    [ "$1" != --transfer ] || transfers=1
    row+=("$1")
    shift
done
[ $# -ge 2 ] || usage
verb=$2
shift 2
case $size in
    400m) updates=75000 ;;
    1b) updates=50000 ;;
    *) die "SIZE is $size; it must be 400m or 1b" ;;
esac
case $verb in
    train)
        [ $# -ge 3 ] || usage
        source=$1 data=$2 out=$3
        shift 3
        ;;
    evaluate)
        [ $# -ge 2 ] || usage
        SPLITS=valid exec bash "$here/../wikitext103/evaluate.sh" context-0 2048 "$@"
        ;;
    *) usage ;;
esac

case ${PRECISION:-bf16} in
    bf16) row+=(--bf16) ;;
    # Gradients in one vector would move weights that are frozen for a time.
    fp16) row+=(--fp16 --fp16-no-flatten-grads) ;;
    fp32) ;;
    *) die "PRECISION is $PRECISION; it must be bf16, fp16 or fp32" ;;
esac
divide_batch 1024
find_source "$source"
[ -e "$data/dict.txt" ] || die "DATA is $data, which holds no dict.txt; prepare.sh makes it"
cmp -s "$(dirname "$checkpoint")/dict.txt" "$data/dict.txt" ||
    die "DATA is $data, whose dict.txt is not that of SOURCE, $source; prepare.sh takes SOURCE"
[ -z "$transfers" ] || row+=(--transfer-from "$checkpoint")
mkdir -p "$out"

# The learning rate is Pythia's of 143,000 updates, "stopped early": the scheduler counts its period after the warm-up.
# Epochs' ends are no occasion to validate or save: how often they come depends on the size of the text.
# Without --required-batch-size-multiple fairseq cuts a batch that is no multiple of 8.
fairseq-train "$data" --save-dir "$out" \
    --user-dir fairseq_fastweights --task fast_weight_language_modeling "${row[@]}" \
    --distributed-world-size "$gpus" --update-freq "$update_freq" \
    --tokens-per-sample 2048 --batch-size "$batch_size" --required-batch-size-multiple 1 \
    --optimizer adam --adam-betas '(0.9, 0.95)' --weight-decay 0.1 --clip-norm 1.0 \
    --lr 0.0003 --lr-scheduler cosine --min-lr 3e-05 --warmup-updates 2000 --warmup-init-lr 0 \
    --lr-period-updates 141000 --max-update "$updates" \
    --validate-interval 1000000 --validate-interval-updates 1000 \
    --save-interval 1000000 --save-interval-updates 1000 --keep-interval-updates 1 \
    --no-epoch-checkpoints --log-format json --log-interval 100 "$@" 2>&1 | tee -a "$out/train.log"
