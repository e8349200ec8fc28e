#!/usr/bin/env bash
# A Transformer that was trained on WikiText-2, and what becomes of it when a fast weight memory takes its attention's
# place (Mao 2022, Tables 1 and 2, scaled down to two CPU cores and about two hours).
#
#   wikitext2.sh DATA OUT [MODEL ...]
#
# DATA    WikiText-2 as examples/wikitext103/prepare.sh leaves it
# OUT     where checkpoints and logs go; models that OUT holds already are not trained again
# MODEL   source, or RULE-M-START: RULE one of decay, gated, delta, add, linear; M features of a key; START scratch,
#         converted (from source, which must be trained), scaled (converted, and what is read is divided by the square
#         root of the head dim, as the source's attention does with what it compares), or aligned (decay and gated as
#         scaled, others as converted; then, for the first fifth of the updates, only the memories are trained, to give
#         what the source's attention gives). Without it: source, then decay, gated, delta and add with M 4 and 16,
#         converted and from scratch, and decay and gated scaled
#
# UPDATES (default 8000) is the length of the source's training; the others take a tenth of it, with the learning rate LR
# (default 0.001). JOBS (default 2) models are trained at the same time, one thread each. summarize.py makes the tables
# and the curves from OUT.
set -euo pipefail

here=$(dirname "$0")
# shellcheck source=examples/common/scripts.sh
. "$here/../common/scripts.sh"

[ $# -ge 2 ] || usage
data=$1 out=$2
shift 2

if [ "${1:-}" != --one ]; then
    [ -e "$data/dict.txt" ] || die "DATA is $data, which holds no dict.txt; examples/wikitext103/prepare.sh makes it"
    models=("$@")
    if [ $# = 0 ]; then
        for rule in decay gated delta add; do
            for features in 4 16; do
                models+=("$rule-$features-converted" "$rule-$features-scratch")
            done
        done
        models=(source "${models[@]}" {decay,gated}-{4,16}-scaled)
    fi
    for model in "${models[@]}"; do
        [[ $model =~ ^(source|(decay|gated|delta|add|linear)-[1-9][0-9]*-(converted|scaled|aligned|scratch))$ ]] ||
            die "MODEL is $model; it must be source or RULE-M-START, as in decay-16-converted"
    done
    updates=${UPDATES:-8000} jobs=${JOBS:-2}
    check_positive JOBS "$jobs"
    [[ $updates =~ ^[1-9][0-9]*0$ ]] || die "UPDATES is $updates; it must be a positive multiple of ten"
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    for model in "${models[@]}"; do
        if [ "$model" = source ]; then bash "$0" "$data" "$out" --one source; fi
    done
    printf '%s\n' "${models[@]}" | { grep -v '^source$' || true; } |
        xargs -r -P "$jobs" -I{} bash "$0" "$data" "$out" --one {}
    exit
fi
model=$2 dir=$out/$2 start=

updates=${UPDATES:-8000} validations=5
if [ "$model" = source ]; then
    flags=(--softmax-attention-layers all --lr 0.002)
else
    updates=$((updates / 10))
    IFS=- read -r rule features start <<< "$model"
    # Each rule as it did best in the paper's Table 1: without normalisation and feature map, but for the delta rule.
    case $rule in
        decay | gated) flags=(--update-rule "$rule" --feature-map identity --normalization none) ;;
        delta) flags=(--update-rule delta --feature-map relu --normalization sum) ;;
        add) flags=(--update-rule sum --feature-map identity --normalization none) ;;
        # Learnt features and attention's normalisation, as in the conversions that transfer attention first.
        linear) flags=(--update-rule sum --feature-map relu --normalization attention) ;;
    esac
    flags+=(--feature-dim "$features" --lr "${LR:-0.001}")
    case $start-$rule in scaled-* | aligned-decay | aligned-gated) flags+=(--scale-read-out) ;; esac
    if [ "$start" != scratch ]; then
        [ -e "$out/source/trained" ] || die "$out/source is not trained yet; $model starts from it"
        flags+=(--transfer-from "$out/source/checkpoint_best.pt")
    fi
fi
mkdir -p "$dir"

train() { # train LOG FLAG...: one training, or the start of one
    local log=$1
    shift
    logged "$log" fairseq-train "$data" --user-dir fairseq_fastweights --task fast_weight_language_modeling --cpu --num-workers 0 \
        --save-dir "$dir" "${flags[@]}" \
        --arch fast_weight_lm_baevski_wiki103 --decoder-layers 4 --decoder-attention-heads 4 \
        --decoder-embed-dim 128 --decoder-input-dim 128 --decoder-output-dim 128 --decoder-ffn-embed-dim 512 \
        --adaptive-input-cutoff 2000,10000 --adaptive-softmax-cutoff 2000,10000 \
        --adaptive-input-factor 2 --adaptive-softmax-factor 2 --dropout 0.1 \
        --criterion adaptive_loss --ddp-backend legacy_ddp \
        --tokens-per-sample 256 --batch-size 4 --batch-size-valid 16 \
        --optimizer adam --clip-norm 0.25 --seed 1 --log-format json "$@"
}
if [ "$start" = aligned ]; then
    # Of the budget, a fifth: what is left is validated after the same updates as the other models.
    first=$((updates < 5 ? 1 : updates / 5)) validations=4
    updates=$((updates > first ? updates - first : 1))
    if [ ! -e "$dir/aligned.log" ]; then
        echo "$model: attention transfer, log in $dir/aligned.log"
        train "$dir/aligned.unfinished" --criterion attention_transfer --lr 0.01 --clip-norm 0 --dropout 0 \
            --attention-dropout 0 --lr-scheduler cosine --warmup-updates $((first / 10)) --max-update "$first" \
            --save-dir "$dir/aligned" --no-epoch-checkpoints --no-save-optimizer-state \
            --log-interval $((first < 20 ? 1 : first / 10))
        mv "$dir/aligned.unfinished" "$dir/aligned.log"
    fi
    flags+=(--finetune-from-model "$dir/aligned/checkpoint_last.pt")
fi
if [ ! -e "$dir/start.log" ] && [ "${start:-scratch}" != scratch ]; then
    # Before any training: an update that changes nothing, and the validation after it.
    echo "$model: its start, log in $dir/start.log"
    train "$dir/start.unfinished" --lr 0 --max-update 1 --no-save --log-interval 1
    mv "$dir/start.unfinished" "$dir/start.log"
fi
if [ ! -e "$dir/trained" ]; then
    # A training that was cut off begins anew: without the optimizer's state fairseq would count updates from 0 again.
    rm -f "$dir"/checkpoint*.pt
    echo "$model: training, log in $dir/train.log"
    interval=$((updates < 10 ? updates : updates / validations))
    train "$dir/train.log" --lr-scheduler cosine --warmup-updates $((updates / 20)) --max-update "$updates" \
        --no-epoch-checkpoints --no-save-optimizer-state --log-interval $((updates < 50 ? 1 : updates / 50)) \
        --validate-interval-updates "$interval" --save-interval-updates "$interval" --keep-interval-updates 1
    [ "$model" != source ] || cp "$data/dict.txt" "$dir/dict.txt"
    touch "$dir/trained"
fi
if [ ! -e "$dir/test.log" ]; then
    echo "$model: the test set"
    logged "$dir/test.unfinished" fairseq-eval-lm "$data" --user-dir fairseq_fastweights \
        --task fast_weight_language_modeling --cpu --num-workers 0 --path "$dir/checkpoint_best.pt" --gen-subset test \
        --tokens-per-sample 256 --context-window 128 --max-tokens 8192 --no-progress-bar
    mv "$dir/test.unfinished" "$dir/test.log"
fi
echo "$model: done"
