#!/usr/bin/env bash
# A scaled-down version of Tables 2 to 4 on WikiText-2, and the papers' other systems at that size, for two CPU cores and
# more than two hours.
#
#   wikitext2.sh DATA OUT [MODEL ...]
#
# DATA    WikiText-2 as prepare.sh leaves it
# OUT     where checkpoints and logs go; models that OUT holds already are not trained again
# MODEL   of those below; all of them if none is named
#
# UPDATES (default 2000) and JOBS (models trained at the same time, default 2) can be set in the environment.
# speed.py measures the models then, and summarize.py makes the table and the figures from OUT.
set -euo pipefail

here=$(dirname "$0")
# shellcheck source=examples/common/scripts.sh
. "$here/../common/scripts.sh"

models=(softmax sum delta delta-no-positions sum-carried delta-carried
    gated decay retention gated-delta kimi-delta delta-product
    local linformer abc mamba transformer-xl-carried)

[ $# -ge 2 ] || usage
data=$1 out=$2
shift 2
updates=${UPDATES:-2000} jobs=${JOBS:-2}

if [ "${1:-}" != --one ]; then
    # Each model is trained by a call of its own, one thread each.
    for model; do
        [[ " ${models[*]} " = *" $model "* ]] || die "MODEL is $model; it must be one of ${models[*]}"
    done
    [ $# = 0 ] || models=("$@")
    check_positive UPDATES "$updates" JOBS "$jobs"
    [ -e "$data/dict.txt" ] || die "DATA is $data, which holds no dict.txt; prepare.sh makes it"
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    printf '%s\n' "${models[@]}" | xargs -P "$jobs" -I{} bash "$0" "$data" "$out" --one {}
    exit
fi
model=$2 dir=$out/$2

length=256
carried=(--no-token-positional-embeddings --carry-over-state)
case $model in
    softmax) flags=(--softmax-attention-layers all) ;;
    sum) flags=(--update-rule sum) ;;
    delta) flags=(--update-rule delta) ;;
    delta-no-positions) flags=(--update-rule delta --no-token-positional-embeddings) ;;
    sum-carried) flags=(--update-rule sum "${carried[@]}") ;;
    delta-carried) flags=(--update-rule delta "${carried[@]}") ;;
    transformer-xl-carried) flags=(--mixers transformer-xl --transformer-xl-memory $length "${carried[@]}") ;;
    *) flags=(--mixers "$model") ;;
esac
mkdir -p "$dir"

common=(--user-dir fairseq_fastweights --task fast_weight_language_modeling --cpu --num-workers 0)
if [ ! -e "$dir/trained" ]; then
    # A training that was cut off begins anew: without the optimizer's state fairseq would count updates from 0 again.
    rm -f "$dir"/checkpoint*.pt
    echo "$model: training, log in $dir/train.log"
    logged "$dir/train.log" fairseq-train "$data" "${common[@]}" --save-dir "$dir" "${flags[@]}" \
        --arch fast_weight_lm_wiki103_small --decoder-layers 4 --decoder-ffn-embed-dim 512 \
        --adaptive-input-cutoff 2000,10000 --adaptive-softmax-cutoff 2000,10000 \
        --criterion adaptive_loss --ddp-backend legacy_ddp \
        --tokens-per-sample $length --batch-size 4 --batch-size-valid 4 \
        --optimizer adam --clip-norm 0.25 --lr 0.001 --lr-scheduler cosine --warmup-updates 200 \
        --max-update "$updates" --seed 1 \
        --no-epoch-checkpoints --no-save-optimizer-state \
        --validate-interval-updates 1000 --save-interval-updates 1000 --keep-interval-updates 1 \
        --log-format json --log-interval 50
    touch "$dir/trained"
fi

score() { # score NAME FLAG...: one evaluation of the test set, kept once it is done, unless the checkpoint is newer
    local name=$1
    shift
    [ -e "$dir/$name.log" ] && [ ! "$dir/checkpoint_best.pt" -nt "$dir/$name.log" ] && return
    echo "$model: $name"
    logged "$dir/$name.unfinished" fairseq-eval-lm "$data" "${common[@]}" --path "$dir/checkpoint_best.pt" \
        --gen-subset test --no-progress-bar "$@"
    mv "$dir/$name.unfinished" "$dir/$name.log"
}
# A window of the training length, 64 new tokens each: a quarter of the work of 16, and the same for every model.
score sliding --tokens-per-sample $length --context-window $((length - 64)) --max-tokens 8192
if [ "$model" != softmax ] && [ "$model" != linformer ]; then # whose states cannot be carried
    score carried --carry-over-state --tokens-per-sample $length
fi
echo "$model: done"
