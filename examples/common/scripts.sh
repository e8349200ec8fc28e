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
