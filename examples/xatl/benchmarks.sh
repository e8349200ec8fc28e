#!/usr/bin/env bash
# Scores a model on LAMBADA, HellaSwag, PIQA, ARC-Easy, ARC-Challenge and WinoGrande, with lm-evaluation-harness.
#
#   benchmarks.sh RUN [OPTION ...]
#
# RUN     the folder of a model's training
# OPTION  of lm_eval (--limit 100, --device cpu, --model_args dtype=bfloat16, ...), behind those that are set here
#
# In the environment, with their defaults:
#
#   CHECKPOINT=checkpoint_best.pt   which of RUN is scored
#   DATA                            a folder with the data, as README.md says; those of the hub, or of its cache
#
# The result is RUN/benchmarks.json; of another checkpoint, as checkpoint_1_5000.pt, RUN/benchmarks.checkpoint_1_5000.json.
# One that is there stands for a test that is done, unless the checkpoint, DATA, what is in it, or options are others.
set -euo pipefail

here=$(dirname "$0")
# shellcheck source=examples/common/scripts.sh
. "$here/../common/scripts.sh"

[ $# -ge 1 ] || usage
run=${1%/} checkpoint=${CHECKPOINT:-checkpoint_best.pt}
shift
[[ $checkpoint != */* ]] || die "CHECKPOINT is $checkpoint; it must be the name of a file in RUN"
[[ $run/$checkpoint =~ ^[^][,{}()]*$ ]] || die "RUN is $run; lm_eval takes no name with a comma or a bracket"
[ -f "$run/$checkpoint" ] || die "RUN is $run, which holds no $checkpoint"
[ -z "${DATA:-}" ] || [ -d "$DATA" ] || die "DATA is $DATA; it must be a folder"

name=benchmarks
[ "$checkpoint" = checkpoint_best.pt ] || name=benchmarks.${checkpoint%.pt}
result=$run/$name.json
# What is scored, by what is in the files.
call=$(printf '%q ' "DATA=${DATA:-}" "$@")$(sha256sum < "$run/$checkpoint")
[ -z "${DATA:-}" ] || call+=$(shopt -s nullglob && cat /dev/null "$DATA"/*.jsonl | sha256sum)
if [ -f "$result" ] && [ "$(cat "$run/$name.call" 2> /dev/null)" = "$call" ]; then
    echo "$result is finished"
    exit
fi

work=$run/$name.unfinished
rm -rf "$work"
mkdir "$work"
trap 'rm -rf "$work"' EXIT
python "$here/benchmark_data.py" "$work/tasks" ${DATA:+"$DATA"}
# As the paper's, texts begin with nothing before them.
python -m fairseq_fastweights.lm_eval --model fairseq-fastweights --batch_size auto \
    --model_args "checkpoint=$run/$checkpoint,add_bos_token=False" \
    --tasks lambada_openai hellaswag piqa arc_easy arc_challenge winogrande \
    ${DATA:+--include_path "$work/tasks"} --output_path "$work/result.json" "$@"
mv "$work"/result_*.json "$work/result" || die "there is no result; what is above says why"
rm -f "$result" "$run/$name.call" # the former result must not pass for this one's
echo "$call" > "$run/$name.call"
mv "$work/result" "$result"
echo "$result: finished"
