#!/usr/bin/env bash
# Translates the validation and the test set with a trained model, and scores the translations.
#
#   generate.sh DATA OUT [OPTION ...]
#
# DATA    as prepare.sh leaves it
# OUT     the folder of the model: checkpoint_best.pt is read; for each set it writes
#         generate-SET.log    what fairseq-generate said
#         generate-SET.hyp    the translations as plain text, line by line those of the source
#         generate-SET.json   BLEU of that text with sacrebleu's signature; BLEU as older papers have it, of Moses'
#                             tokens with compounds split; seconds, tokens per second, options
# OPTION  of fairseq-generate (--fp16, --cpu, --max-tokens N, ...); it overrides what this script sets
#
# SUBSETS (default "valid test") in the environment are the sets. A result that is there already is kept, unless it is of
# another model or other data.
set -euo pipefail

here=$(dirname "$0")
# shellcheck source=examples/common/scripts.sh
. "$here/../common/scripts.sh"

[ $# -ge 2 ] || usage
data=$1 out=$2
shift 2
[ -e "$data/preparation.json" ] || die "DATA is $data, which holds no preparation.json; prepare.sh makes it"
[ -e "$out/checkpoint_best.pt" ] || die "OUT is $out, which holds no checkpoint_best.pt"
for option; do
    case ${option%%=*} in
        --remove-bpe | --post-process | --quiet | --results-path)
            die "OPTION is $option; it must not be given, as the translations are read from the subwords in the log" ;;
        --gen-subset) die "OPTION is $option; set SUBSETS in the environment" ;;
    esac
done

# Vaswani et al. 2017: beam 4, length penalty 0.6, at most 50 tokens longer than the source.
options=(--beam 4 --lenpen 0.6 --max-len-a 1 --max-len-b 50 "$@")
for subset in ${SUBSETS:-valid test}; do
    case $subset in
        valid | test) ;;
        *) die "SUBSETS is $SUBSETS; it must be valid, test or both" ;;
    esac
    name=$out/generate-$subset
    of=$(python "$here/score.py" identify "$data" "$subset" "$out/checkpoint_best.pt")
    if [ -e "$name.json" ]; then
        echo -n "$out: "
        status=0
        python "$here/score.py" report "$name.json" "$of" "${options[@]}" || status=$?
        [ $status != 0 ] || continue
        [ $status = 3 ] || exit $status
    fi
    echo "$out: translating $subset"
    # One process: fairseq would give each of several GPUs its share of the sentences. Unbuffered, so that no message on
    # stderr lands within a translation.
    rm -f "$name.log.unfinished" # or it could be a link
    PYTHONUNBUFFERED=1 fairseq-generate "$data" --path "$out/checkpoint_best.pt" --gen-subset "$subset" \
        --user-dir fairseq_fastweights --task translation --distributed-world-size 1 --no-progress-bar \
        "${options[@]}" > "$name.log.unfinished" 2>&1 || {
        tail -n 3 "$name.log.unfinished" >&2
        die "generation failed; $name.log.unfinished says more"
    }
    mv "$name.log.unfinished" "$name.log"
    echo -n "$out: "
    python "$here/score.py" make "$name.log" "$data" "$subset" "$name.hyp" "$name.json" "$of" "${options[@]}"
done
