#!/usr/bin/env bash
# What the rows of Table 1 share (Schlag et al. 2021, Sec. 6.2 and App. E). The script of a row is called as
#
#   ROW.sh train DATA OUT [OPTION ...]      trains the model; called again, it goes on where it stopped
#   ROW.sh generate DATA OUT [OPTION ...]   translates and scores the validation and the test set, see generate.sh
#
# DATA    WMT14 as prepare.sh leaves it
# OUT     where checkpoints, logs and translations of this model go
# OPTION  of fairseq-train (--fp16, --cpu, --seed 2, ...) or fairseq-generate; it overrides what the scripts set
#
# GPUS (default 1) in the environment is the number of GPUs that train, and UPDATE_FREQ (default 48 / GPUS) how many
# batches each of them adds up for one update. The paper's 48 batches of 3584 tokens are divided among them.
#
# It calls this one: row.sh MODEL-OPTION ... -- train|generate DATA OUT [OPTION ...]
set -euo pipefail

here=$(dirname "$0")
# shellcheck source=examples/common/scripts.sh
. "$here/../common/scripts.sh"

batch=$((3 * 16 * 3584)) # GPUs, batches added up, tokens: those of the paper

row=()
while [ "${1:---}" != -- ]; do
    row+=("$1")
    shift
done
[ $# -ge 4 ] || usage
verb=$2 data=$3 out=$4
shift 4

case $verb in
    train) ;;
    generate) exec bash "$here/generate.sh" "$data" "$out" "$@" ;;
    *) usage ;;
esac

gpus=${GPUS:-1}
check_positive GPUS "$gpus"
if [ -z "${UPDATE_FREQ:-}" ] && [ $((48 % gpus)) != 0 ]; then
    die "GPUS is $gpus; it must divide 48, or UPDATE_FREQ must be given too"
fi
update_freq=${UPDATE_FREQ:-$((48 / gpus))}
check_positive UPDATE_FREQ "$update_freq"
if [ $((batch % (gpus * update_freq))) != 0 ]; then
    die "GPUS x UPDATE_FREQ is $((gpus * update_freq)); it must divide the batch of $batch tokens"
fi
[ -e "$data/preparation.json" ] || die "DATA is $data, which holds no preparation.json; prepare.sh makes it"

# Validation BLEU is of text without subwords and tokens, as generate.sh has it.
if [ -e "$data/subwords.codes" ]; then
    target=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["made from"]["target"])' \
        "$data/preparation.json")
    detokenize=(--eval-bleu-remove-bpe --eval-bleu-detok moses
        --eval-bleu-detok-args "{\"source_lang\": \"$target\", \"target_lang\": \"$target\"}")
else
    detokenize=(--eval-bleu-remove-bpe sentencepiece)
fi
mkdir -p "$out"

fairseq-train "$data" --save-dir "$out" \
    --user-dir fairseq_fastweights --task translation \
    --arch fast_weight_transformer_wmt_en_de_big --share-all-embeddings "${row[@]}" \
    --distributed-world-size "$gpus" --update-freq "$update_freq" \
    --max-tokens $((batch / gpus / update_freq)) --max-tokens-valid 3584 \
    --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 0 --weight-decay 0 --dropout 0.3 \
    --lr 0.0005 --lr-scheduler inverse_sqrt --warmup-updates 4000 --warmup-init-lr 1e-07 --max-epoch 45 \
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1 \
    --eval-bleu --eval-bleu-args '{"beam": 4, "lenpen": 0.6, "max_len_a": 1, "max_len_b": 50}' "${detokenize[@]}" \
    --best-checkpoint-metric bleu --maximize-best-checkpoint-metric \
    --no-epoch-checkpoints --log-format json --log-interval 100 "$@" 2>&1 | tee -a "$out/train.log"
