#!/usr/bin/env bash
# Prepares text for fine-tuning a converted GPT-2, or any model that from-huggingface reads: cuts it into the model's own subwords, binarises them.
#
#   prepare.sh OUT SOURCE FOLDER
#
# OUT     where the binarised data go; it appears when all is done, and a finished OUT is left as it is
# SOURCE  the model, as `python -m fairseq_fastweights.conversion from-huggingface` leaves it
# FOLDER  the text: train and valid (or val), and test if there is one, files or folders of files. .txt has documents with a line <|endoftext|>
#         between them; .jsonl an object a line, of which "text" is a document, as The Pile has it; also .gz and .zst
#
# In the environment, with their defaults:
#
#   TRAIN_TOKENS=3276800000   of the training text; the default is what 100,000 updates read
#   VALID_TOKENS=10000000     of the validation text
#   WORKERS                   processes; as many as there are cores
#
# Work in progress lies in OUT.unfinished; a split that is encoded there is not encoded again.
set -euo pipefail

here=$(dirname "$0")
# shellcheck source=examples/common/scripts.sh
. "$here/../common/scripts.sh"

[ $# = 3 ] || usage
out=${1%/} source=$2 folder=$3
if [ -e "$out/dict.txt" ]; then
    cmp -s "$source/dict.txt" "$out/dict.txt" ||
        die "$out is finished, but with another dictionary than that of SOURCE, $source; name another folder"
    echo "$out is finished"
    exit 0
fi
check_new "$out"
for name in dict.txt tokenizer.json tokenizer_words.json; do
    [ -e "$source/$name" ] || die "SOURCE is $source, which holds no $name; from-huggingface makes it"
done
[ -d "$folder" ] || die "there is no folder $folder"
workers=${WORKERS:-$(nproc)}
check_program fairseq-preprocess

work=$out.unfinished
mkdir -p "$work"
python "$here/encode.py" "$source" "$folder" "$work" --train-tokens "${TRAIN_TOKENS:-3276800000}" \
    --valid-tokens "${VALID_TOKENS:-10000000}" --workers "$workers" || {
    rmdir "$work" 2> /dev/null || true
    exit 1
}
rm -rf "${work:?}/bin"
splits=(--trainpref "$work/train.bpe" --validpref "$work/valid.bpe")
[ ! -e "$work/test.bpe" ] || splits+=(--testpref "$work/test.bpe")
fairseq-preprocess --only-source --srcdict "$source/dict.txt" --workers "$workers" --destdir "$work/bin" "${splits[@]}"
cp "$work/words.json" "$work/bin"
[ ! -d "$out" ] || rmdir "$out"
mv "$work/bin" "$out"
rm -r "$work"
echo "$out: the text in the subwords of $source"
