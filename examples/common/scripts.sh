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

# check_new OUT: whether it is free
check_new() {
    [ ! -e "$1" ] || [ -z "$(ls -A "$1")" ] ||
        die "$1 is there, but is not what this script makes; name another folder, or delete it"
}

# check_program NAME
check_program() {
    command -v "$1" > /dev/null || die "there is no $1; is the environment activated?"
}
