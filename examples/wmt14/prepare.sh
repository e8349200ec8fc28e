#!/usr/bin/env bash
# Prepares WMT14 English-German, or any parallel text, for fairseq: from raw text to binarised subwords.
#
#   prepare.sh OUT [FOLDER]
#
# OUT     where the data go; it appears when all is done, and a finished OUT is left as it is
# FOLDER  raw text, {train,valid,test}.{en,de}, plain or gzipped; without it WMT14 is downloaded (1.7 GB), with
#         newstest2013 for validation and newstest2014 as test set
#
# In the environment, with their defaults:
#
#   SRC=en TGT=de           the languages
#   SUBWORDS=sentencepiece  or bpe: Moses tokens (sacremoses) cut by subword-nmt, as in the paper
#   VOCABULARY=32000        subwords, or merges, of both languages together
#   MAX_LENGTH=250          a pair with more subwords on a side is not trained on
#   MAX_RATIO=1.5           nor is one whose sides differ by more than this factor
#   WORKERS                 processes; as many as there are cores
#   DOWNLOADS               where downloads are kept; by default in OUT.unfinished, until all is done
#   WMT14_URL=http://www.statmt.org
#
# Work in progress lies in OUT.unfinished. Stages and downloads that are finished there are not done again, and a
# download that was cut off goes on.
set -euo pipefail

here=$(dirname "$0")
# shellcheck source=examples/common/scripts.sh
. "$here/../common/scripts.sh"

[ $# -ge 1 ] && [ $# -le 2 ] || usage
out=${1%/} folder=${2:-}
source=${SRC:-en} target=${TGT:-de}
check_program fairseq-preprocess
if [ -n "$folder" ]; then
    exec python "$here/preparation.py" "$out" "$folder"
fi

# --- WMT14 from where it was published

case $source-$target in
    en-de | de-en) ;;
    *) die "SRC is $source and TGT $target; without FOLDER they must be en and de" ;;
esac
url=${WMT14_URL:-http://www.statmt.org}
digest=(--digest "WMT14 training set, newstest2013, newstest2014")
downloads=${DOWNLOADS:-$out.unfinished/downloads}
text=$out.unfinished/original-$source-$target
python "$here/preparation.py" "$out" "$text" "${digest[@]}" --check && exit
[ $? = 3 ] || exit 1
mkdir -p "$downloads" "$text"

fetch() { # fetch PATH BYTES SHA256: one archive, which has its name once it is whole
    local file=$downloads/${1##*/}
    [ ! -e "$file" ] || return 0
    if [ ! -e "$file.part" ] || [ "$(wc -c < "$file.part")" -lt "$2" ]; then
        echo "downloading $url/$1"
        curl --fail --location --show-error --continue-at - --output "$file.part" "$url/$1" \
            || die "cannot download $url/$1; run it again to go on, or give the folder of the text as second argument"
    fi
    if [ "$(sha256sum < "$file.part" | cut -d ' ' -f 1)" != "$3" ]; then
        rm "$file.part"
        die "what came from $url/$1 is damaged and was deleted; run it again"
    fi
    mv "$file.part" "$file"
}
fetch wmt13/training-parallel-europarl-v7.tgz 657632379 \
    0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7
fetch wmt13/training-parallel-commoncrawl.tgz 918311367 \
    c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5
fetch wmt14/training-parallel-nc-v9.tgz 80418416 \
    cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485

unpack() { # unpack ARCHIVE TEXT
    tar --extract --gzip --to-stdout --file "$downloads/$1" "$2"
}
for language in "$source" "$target"; do
    if [ ! -e "$text/train.$language" ]; then
        {
            unpack training-parallel-europarl-v7.tgz "training/europarl-v7.de-en.$language"
            unpack training-parallel-commoncrawl.tgz "commoncrawl.de-en.$language"
            unpack training-parallel-nc-v9.tgz "training/news-commentary-v9.de-en.$language"
        } > "$text/train.$language.part"
        mv "$text/train.$language.part" "$text/train.$language"
    fi
    [ "$language" = "$source" ] && side=src || side=ref
    # sacrebleu fetches the sets, and has their checksums.
    for set in valid:wmt13 test:wmt14/full; do
        file=$text/${set%%:*}.$language
        if [ ! -e "$file" ]; then
            sacrebleu --test-set "${set#*:}" --language-pair "$source-$target" --echo "$side" > "$file.part" \
                || die "sacrebleu cannot fetch ${set#*:}; run it again to go on"
            mv "$file.part" "$file"
        fi
    done
done

python "$here/preparation.py" "$out" "$text" "${digest[@]}"
rm -r "$text"
[ -n "${DOWNLOADS:-}" ] || rm -r "$downloads"
rmdir "$out.unfinished" 2> /dev/null || true
