#!/usr/bin/env bash
# Prepares WikiText-103 or WikiText-2 for fairseq: fetches it if it is not there, checks its counts, binarises it.
#
#   prepare.sh OUT [FOLDER]
#
# OUT     where the binarised data goes; it appears when all is done, and a finished OUT is left as it is
# FOLDER  the original files wiki.{train,valid,test}.tokens, plain or gzipped; without it WikiText-103 is downloaded
#
# In the environment, DICT names the dict.txt of a trained model that is to be fine-tuned or scored: words get their
# numbers from there. Without it they are numbered anew, and the model of another numbering is worth nothing.
#
# SUBWORDS is a number of subwords to cut the words into, with sentencepiece; models with few types train in a fraction of
# the time, and a perplexity per word can be told of them, too. Without it the types are the text's words.
#
# The token counts tell which of the two corpora it is. SKIP_COUNTS=1 takes any other corpus in the same format.
# Work in progress lies in OUT.unfinished. A download that was cut off is kept there, and the next run goes on with it.
set -euo pipefail

here=$(dirname "$0")
# shellcheck source=examples/common/scripts.sh
. "$here/../common/scripts.sh"

# The address in fairseq's own preparation script no longer serves the file; this is its author's.
url=${WIKITEXT_URL:-https://wikitext.smerity.com/wikitext-103-v1.zip}

[ $# -ge 1 ] && [ $# -le 2 ] || usage
out=${1%/} folder=${2:-} dict=${DICT:-} subwords=${SUBWORDS:-}
[ -z "$subwords" ] || check_positive SUBWORDS "$subwords"
[ -z "$subwords" ] || [ -z "$dict" ] || die "SUBWORDS and DICT are both given; subwords have a dictionary of their own"
[ -z "$dict" ] || [ -s "$dict" ] || die "DICT is $dict; it must be a model's dict.txt"
if [ -e "$out/dict.txt" ]; then
    if [ -n "$dict" ] && ! cmp -s <(cut -d ' ' -f 1 "$dict") <(cut -d ' ' -f 1 "$out/dict.txt"); then
        die "$out is finished, but its words are not those of DICT, $dict, in the same order; name another folder"
    fi
    echo "$out is finished"
    exit 0
fi
check_new "$out"
check_program fairseq-preprocess

work=$out.unfinished
archive=$work/wikitext-103-v1.zip
clear_work() { # all but the download
    rm -rf "${work:?}/text" "${work:?}/bin"
    rmdir "$work" 2> /dev/null || true
}
clear_work
mkdir -p "$work/text"
trap clear_work EXIT

if [ -z "$folder" ]; then
    if [ ! -e "$archive" ]; then
        echo "downloading $url"
        if ! curl --fail --location --show-error --continue-at - --output "$archive.part" "$url"; then
            die "cannot download $url; run it again to go on, delete $work to begin anew, or give the folder of the" \
                "files as second argument"
        fi
        mv "$archive.part" "$archive"
    fi
    if ! python -m zipfile -e "$archive" "$work/text"; then
        rm "$archive"
        die "what came from $url is damaged and was deleted; run it again"
    fi
    folder=$work/text/wikitext-103
fi
[ -d "$folder" ] || die "there is no folder $folder"
folder=$(cd "$folder" && pwd)

# Counts as fairseq does: not with wc, which takes a word of bytes above 127 for none at all in the C locale.
count='
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from common.files import UserError, read_lines
try:
    print(sum(1 + len(line.split()) for line, _ in read_lines(Path(sys.argv[2]))))
except UserError as error:
    sys.exit(f"prepare.sh: {error}")'
counts=()
for split in train valid test; do
    name=wiki.$split.tokens
    if [ -e "$folder/$name" ]; then
        given=$folder/$name
        ln -s "$given" "$work/text/$name"
    elif [ -e "$folder/$name.gz" ]; then
        given=$folder/$name.gz
        gzip --decompress --stdout "$given" > "$work/text/$name"
    else
        die "$folder holds neither $name nor $name.gz"
    fi
    [ -s "$work/text/$name" ] || die "$folder/$name is empty"
    counts+=("$(python -c "$count" "$here/.." "$given")") || exit 1
done
case ${counts[*]} in
    "103227021 217646 245569") corpus=WikiText-103 types=267735 ;;
    "2088628 217646 245569") corpus=WikiText-2 types=33278 ;;
    *) corpus="unknown corpus" types= ;;
esac
if [ -z "$types" ] && [ "${SKIP_COUNTS:-0}" != 1 ]; then
    die "train, valid and test have ${counts[*]} tokens with line ends, which is neither WikiText-103" \
        "(103227021 217646 245569) nor WikiText-2 (2088628 217646 245569); SKIP_COUNTS=1 takes them all the same"
fi

text=$work/text
if [ -n "$subwords" ]; then
    mkdir "$text/cut"
    python "$here/cut.py" "$text" "$text/cut" "$subwords"
    text=$text/cut types=
    dict=$text/dict.txt
fi
numbered=()
[ -z "$dict" ] || numbered=(--srcdict "$dict")
fairseq-preprocess --only-source --workers "$(nproc)" "${numbered[@]}" --destdir "$work/bin" \
    --trainpref "$text/wiki.train.tokens" --validpref "$text/wiki.valid.tokens" --testpref "$text/wiki.test.tokens"
[ -z "$subwords" ] || cp "$text/subwords.model" "$text/words.json" "$work/bin"

# <unk> and the line end are word types too; fairseq has them built in, without a line in dict.txt.
found=$(($(LC_ALL=C grep --count --invert-match '^madeupword' "$work/bin/dict.txt") + 2))
if [ -n "$types" ] && [ "$found" != "$types" ]; then
    whose=${dict:+$dict has}
    die "$corpus has $types word types with <unk> and line end, but ${whose:-these files have} $found"
fi
[ ! -d "$out" ] || rmdir "$out"
mv "$work/bin" "$out"
rm -f "$archive"
echo "$corpus in $out: ${counts[*]} tokens with line ends in train, valid and test; $found ${subwords:+sub}word types"
