#!/usr/bin/env bash
# What the rows of Mao's (2022) Table 3 share (Sec. 5 and App. B). The script of a row is called as
#
#   ROW.sh train SOURCE DATA OUT [OPTION ...]   fine-tunes the model; called again, it goes on where it stopped
#   ROW.sh evaluate DATA OUT [OPTION ...]       scores the validation and the test set with contexts of 0 and of 480
#
# SOURCE  the published checkpoint of Baevski and Auli, adaptive_lm_wiki103.v2: a folder with model.pt and dict.txt
# DATA    WikiText-103 as prepare.sh leaves it with DICT=SOURCE/dict.txt
# OUT     where checkpoints and logs of this model go
# OPTION  of fairseq-train (--fp16, --bf16, --seed 2, ...) or fairseq-eval-lm; it overrides what the scripts set
#
# GPUS (default 1) in the environment is the number of GPUs that train, and UPDATE_FREQ (default 1) how many batches
# each of them adds up for one update. The paper's batch is divided among them.
#
# It calls this one: mao-row.sh M -- train|evaluate ..., M the size of a head's keys, or base for the checkpoint itself.
set -euo pipefail

here=$(dirname "$0")
# shellcheck source=examples/common/scripts.sh
. "$here/../common/scripts.sh"

[ $# -ge 3 ] && [ "$2" = -- ] || usage
size=$1 verb=$3
shift 3
case $size in
    base)
        # An update that changes nothing leaves the checkpoint in OUT, in today's format.
        row=(--softmax-attention-layers all --lr 0 --max-update 1 --no-save-optimizer-state)
        ;;
    *)
        [[ $size =~ ^[1-9][0-9]*$ ]] || die "M is $size; it must be a positive number, or base"
        row=(--update-rule decay --feature-map identity --normalization none --feature-dim "$size"
            --lr 0.0001 --lr-scheduler cosine --min-lr 2e-06 --warmup-updates 4000 --max-update 100000)
        ;;
esac

case $verb in
    train)
        [ $# -ge 3 ] || usage
        source=$1 data=$2 out=$3
        shift 3
        ;;
    evaluate)
        [ $# -ge 2 ] || usage
        for context in 0 480; do
            # "At the end of the training", says the paper, and not at its best.
            CHECKPOINT=checkpoint_last.pt bash "$here/evaluate.sh" "context-$context" 512 "$@"
        done
        exit
        ;;
    *) usage ;;
esac

divide_batch 26
find_source "$source"
[ -e "$data/dict.txt" ] || die "DATA is $data, which holds no dict.txt; prepare.sh makes it"
mkdir -p "$out"

# adaptive_loss leaves the weights of bands that a batch does not touch without a gradient: only legacy_ddp takes that.
# Without --required-batch-size-multiple fairseq cuts a batch of 26 to 24.
fairseq-train "$data" --save-dir "$out" \
    --user-dir fairseq_fastweights --task fast_weight_language_modeling --transfer-from "$checkpoint" \
    --arch fast_weight_lm_baevski_wiki103 "${row[@]}" \
    --criterion adaptive_loss --ddp-backend legacy_ddp \
    --distributed-world-size "$gpus" --update-freq "$update_freq" \
    --tokens-per-sample 512 --batch-size "$batch_size" --required-batch-size-multiple 1 \
    --optimizer adam --clip-norm 0.1 \
    --no-epoch-checkpoints --log-format json --log-interval 100 "$@" 2>&1 | tee -a "$out/train.log"
