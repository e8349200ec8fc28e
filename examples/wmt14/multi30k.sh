#!/usr/bin/env bash
# A scaled-down version of Table 1 on Multi30k, English to German, for two CPU cores.
#
#   multi30k.sh DATA OUT [MODEL ...] [-- OPTION ...]
#
# DATA    Multi30k as prepare.sh leaves it
# OUT     where checkpoints, logs and translations go, a folder for each model; called again, what was cut off goes on
#         and what is finished is kept
# MODEL   of those below; all of them if none is named
# OPTION  of fairseq-train; it overrides what this script sets
#
# UPDATES (default 3871, which is 7 times the training text), JOBS (models trained at the same time, default 2) and
# DEVICE (default cpu; gpu is the other) can be set in the environment. summarize.py makes the table and the curves from
# OUT.
set -euo pipefail

here=$(dirname "$0")
# shellcheck source=examples/common/scripts.sh
. "$here/../common/scripts.sh"

models=(softmax linear favor dpfp)
[ $# -ge 2 ] || usage
data=$1 out=$2
shift 2
updates=${UPDATES:-3871} jobs=${JOBS:-2}

if [ "${1:-}" != --one ]; then
    # Each model is trained by a call of its own, one thread each.
    chosen=()
    while [ $# -gt 0 ] && [ "$1" != -- ]; do
        [[ " ${models[*]} " = *" $1 "* ]] || die "MODEL is $1; it must be one of ${models[*]}"
        chosen+=("$1")
        shift
    done
    [ $# = 0 ] || shift
    check_positive UPDATES "$updates" JOBS "$jobs"
    [ -e "$data/preparation.json" ] || die "DATA is $data, which holds no preparation.json; prepare.sh makes it"
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    printf '%s\n' "${chosen[@]:-${models[@]}}" | xargs -P "$jobs" -n 1 bash "$0" "$data" "$out" --one "$@"
    exit
fi
model=${!#} dir=$out/${!#} # xargs put it last
set -- "${@:2:$#-2}"

# As many features for a head's dimensions as in the paper's models of 256, 4 for each: 128 for 32.
case $model in
    softmax) flags=(--fast-weight-attention none) ;;
    linear) flags=(--feature-map elu) ;;
    favor) flags=(--feature-map favor --favor-features 64) ;;
    dpfp) flags=(--feature-map dpfp --dpfp-nu 2) ;;
esac
case ${DEVICE:-cpu} in
    cpu) device=(--cpu) ;;
    gpu) device=() ;;
    *) die "DEVICE is $DEVICE; it must be cpu or gpu" ;;
esac

mkdir -p "$dir"
settings="UPDATES=$updates $*"
if [ -e "$dir/settings" ] && [ "$(cat "$dir/settings")" != "$settings" ]; then
    die "$dir was begun with $(cat "$dir/settings"), and this is $settings; name another OUT, or delete it"
fi
echo "$settings" > "$dir/settings"

if [ ! -e "$dir/trained" ]; then
    echo "$model: training, log in $dir/train.log"
    fairseq-train "$data" --save-dir "$dir" --user-dir fairseq_fastweights --task translation \
        --arch fast_weight_transformer_multi30k_en_de --share-all-embeddings "${flags[@]}" \
        "${device[@]}" --distributed-world-size 1 --num-workers 0 --max-tokens 1024 --dropout 0.1 \
        --optimizer adam --adam-betas '(0.9, 0.98)' \
        --lr 0.003 --lr-scheduler inverse_sqrt --warmup-updates 600 --warmup-init-lr 1e-07 --max-update "$updates" \
        --criterion label_smoothed_cross_entropy --label-smoothing 0.1 --seed 1 \
        --no-epoch-checkpoints --log-format json --log-interval 50 "$@" >> "$dir/train.log" 2>&1 \
        || { tail -n 3 "$dir/train.log" >&2; exit 1; }
    touch "$dir/trained"
fi
bash "$here/generate.sh" "$data" "$dir" "${device[@]}"
