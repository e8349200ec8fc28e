#!/usr/bin/env bash
# What the rows of Tables 1 and 2 share (Mao 2022, Sec. 4 and App. A). The script of a row is called as
#
#   ROW.sh train SOURCE DATA OUT [OPTION ...]   fine-tunes the model; called again, it goes on where it stopped
#   ROW.sh evaluate DATA OUT [OPTION ...]       scores the validation set in segments of 1024
#
# SOURCE  what its weights are from: the OUT of target.sh; for target.sh itself the converted GPT-2
# DATA    text as prepare.sh leaves it
# OUT     where checkpoints and logs of this model go; dict.txt appears there when it is trained
# OPTION  of fairseq-train (--seed 2, --arch fast_weight_lm_gpt2_medium, ...) or fairseq-eval-lm; it overrides what the
#         scripts set
#
# In the environment, with their defaults:
#
#   GPUS=1          that train
#   UPDATE_FREQ=1   batches that each of them adds up for one update; the paper's batch is divided among them
#   PRECISION=fp16  of the training; or bf16, fp32
#
# It calls this one: row.sh MODEL-OPTION ... -- train|evaluate ...
set -euo pipefail

here=$(dirname "$0")
# shellcheck source=examples/common/scripts.sh
. "$here/../common/scripts.sh"

row=()
while [ "${1:---}" != -- ]; do
    row+=("$1")
    shift
done
[ $# -ge 2 ] || usage
verb=$2
shift 2
case $verb in
    train)
        [ $# -ge 3 ] || usage
        source=$1 data=$2 out=$3
        shift 3
        ;;
    evaluate)
        [ $# -ge 2 ] || usage
        SPLITS=valid exec bash "$here/../wikitext103/evaluate.sh" context-0 1024 "$@"
        ;;
    *) usage ;;
esac

# In float16 the plugin computes the normalisers of attention normalisation in float32, as the paper does.
case ${PRECISION:-fp16} in
    fp16) row+=(--fp16) ;;
    bf16) row+=(--bf16) ;;
    fp32) ;;
    *) die "PRECISION is $PRECISION; it must be fp16, bf16 or fp32" ;;
esac
divide_batch 32
find_source "$source"
[ -e "$data/dict.txt" ] || die "DATA is $data, which holds no dict.txt; prepare.sh makes it"
mkdir -p "$out"

# Epochs' ends are no occasion to validate or save: how often they come depends on the size of the text.
# Without --required-batch-size-multiple fairseq cuts a batch that is no multiple of 8.
fairseq-train "$data" --save-dir "$out" \
    --user-dir fairseq_fastweights --task fast_weight_language_modeling --transfer-from "$checkpoint" \
    --arch fast_weight_lm_gpt2_small "${row[@]}" \
    --distributed-world-size "$gpus" --update-freq "$update_freq" \
    --tokens-per-sample 1024 --batch-size "$batch_size" --required-batch-size-multiple 1 \
    --optimizer adam --clip-norm 1.0 \
    --lr 0.0006 --lr-scheduler cosine --min-lr 1.2e-05 --warmup-updates 4000 --max-update 100000 \
    --validate-interval 1000000 --validate-interval-updates 4000 \
    --save-interval 1000000 --save-interval-updates 4000 --keep-interval-updates 1 \
    --no-epoch-checkpoints --log-format json --log-interval 100 "$@" 2>&1 | tee -a "$out/train.log"

# A model can be SOURCE once its dictionary is beside it.
if grep -q '| done training in ' "$out/train.log"; then
    cp "$data/dict.txt" "$out/dict.txt"
fi
