# shellcheck shell=bash
# What the examples' scripts share. They source this file, after `set -euo pipefail`; the comment at their head is what
# `usage` prints.

die() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

usage() {
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

# check_positive NAME VALUE ...
check_positive() {
    while [ $# -gt 0 ]; do
        [[ $2 =~ ^[1-9][0-9]*$ ]] || die "$1 is $2; it must be a positive number"
        shift 2
    done
}

# divide_batch SIZE: sets gpus and update_freq, from GPUS and UPDATE_FREQ in the environment, and batch_size, what is
# left of SIZE for each GPU's batch.
divide_batch() {
    gpus=${GPUS:-1} update_freq=${UPDATE_FREQ:-1}
    check_positive GPUS "$gpus" UPDATE_FREQ "$update_freq"
    if [ $(($1 % (gpus * update_freq))) != 0 ]; then
        die "GPUS x UPDATE_FREQ is $((gpus * update_freq)); it must divide the batch of $1"
    fi
    # shellcheck disable=SC2034
    batch_size=$(($1 / gpus / update_freq))
}

# find_source SOURCE: sets checkpoint, which SOURCE is or holds; a dictionary must lie beside it.
find_source() {
    local name
    checkpoint=$1
    if [ -d "$1" ]; then
        for name in model.pt checkpoint_best.pt; do
            checkpoint=$1/$name
            [ ! -e "$checkpoint" ] || break
        done
    fi
    [ -e "$checkpoint" ] || die "SOURCE is $1; it must be a folder with model.pt or checkpoint_best.pt, or a checkpoint"
    [ -e "$(dirname "$checkpoint")/dict.txt" ] ||
        die "SOURCE is $1, but there is no dict.txt beside $checkpoint: its training is not finished, or the" \
            "dictionary was left behind"
}
