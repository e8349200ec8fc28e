#!/usr/bin/env bash
# What the rows of Tables 2 to 5 share (Schlag et al. 2021, Sec. 6.3 and App. F). The script of a row is called as
#
#   ROW.sh train DATA OUT [OPTION ...]      trains the model; called again, it goes on where it stopped
#   ROW.sh evaluate DATA OUT [OPTION ...]   scores the validation and the test set as the row's table does
#
# DATA    WikiText-103 as prepare.sh leaves it
# OUT     where checkpoints and logs of this model go
# OPTION  of fairseq-train (--fp16, --bf16, --seed 2, ...) or fairseq-eval-lm; it overrides what the scripts set
#
# GPUS (default 1) in the environment is the number of GPUs that train, and UPDATE_FREQ (default 1) how many batches
# each of them adds up for one update. The paper's batch is divided among them.
#
# It calls this one: row.sh SIZE CONTEXTS MODEL-OPTION ... -- train|evaluate DATA OUT [OPTION ...]
set -euo pipefail

here=$(dirname "$0")
# shellcheck source=examples/common/scripts.sh
. "$here/../common/scripts.sh"

[ $# -ge 2 ] || usage
size=$1 contexts=$2
shift 2
row=()
while [ "${1:---}" != -- ]; do
    row+=("$1")
    shift
done
[ $# -ge 4 ] || usage
verb=$2 data=$3 out=$4
shift 4

case $size in
    small) length=256 batch=96 updates=500000 ;;
    medium) length=384 batch=56 updates=400000 ;;
    *) die "SIZE is $size; it must be small or medium" ;;
esac
# State that is carried over is validated as it is evaluated: as one stream.
case $contexts in
    sliding) ;;
    carried) row+=(--carry-over-state --batch-size-valid 1) ;;
    *) die "CONTEXTS is $contexts; it must be sliding or carried" ;;
esac

case $verb in
    train) ;;
    evaluate) exec bash "$here/evaluate.sh" "$contexts" "$length" "$data" "$out" "$@" ;;
    *) usage ;;
esac

divide_batch "$batch"
if [ "$contexts" = carried ] && [ "$update_freq" != 1 ]; then
    die "UPDATE_FREQ is $update_freq; with state carried over it must be 1, because each of the $batch streams has a" \
        "row of the batch to itself"
fi
[ -e "$data/dict.txt" ] || die "DATA is $data, which holds no dict.txt; prepare.sh makes it"
mkdir -p "$out"

# adaptive_loss leaves the weights of bands that a batch does not touch without a gradient: only legacy_ddp takes that.
# Without --required-batch-size-multiple fairseq cuts a batch of 28 to 24.
fairseq-train "$data" --save-dir "$out" \
    --user-dir fairseq_fastweights --task fast_weight_language_modeling \
    --arch "fast_weight_lm_wiki103_$size" "${row[@]}" \
    --criterion adaptive_loss --ddp-backend legacy_ddp \
    --distributed-world-size "$gpus" --update-freq "$update_freq" \
    --tokens-per-sample "$length" --batch-size "$batch_size" --required-batch-size-multiple 1 \
    --optimizer adam --clip-norm 0.25 \
    --lr 0.00025 --lr-scheduler cosine --warmup-updates 2000 --max-update "$updates" \
    --no-epoch-checkpoints --log-format json --log-interval 100 "$@" 2>&1 | tee -a "$out/train.log"
