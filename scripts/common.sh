# Shared by the scripts: the project's environment, options, and how they speak. Source it.
# shellcheck shell=bash
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '\n== %s\n' "$*"; }
die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}
usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; }

# options "NAME SWITCH! ..." "$@": --name VALUE becomes $name and --switch $switch=1; other words become the array
# `words`, and what stands after -- the array `rest`
options() {
    local names=" $1 " name
    shift
    words=() rest=()
    while [ $# -gt 0 ]; do
        name=${1#--}
        case $1 in
            --help | -h) usage; exit 0 ;;
            --) shift; rest=("$@"); break ;;
            --*)
                if [[ $names = *" $name! "* ]]; then
                    printf -v "${name//-/_}" 1
                    shift
                    continue
                fi
                [[ $names = *" $name "* ]] || die "unknown option $1; see $0 --help"
                [ $# -ge 2 ] || die "$1 needs a value"
                printf -v "${name//-/_}" %s "$2"
                shift 2 ;;
            *) words+=("$1"); shift ;;
        esac
    done
}
# option_and_words "NAME ..." "$@": as `options`, but only takes these, the first two words and what is left as `rest`
option_and_words() {
    local names=" $1 "
    shift
    words=() rest=()
    while [ $# -gt 0 ]; do
        if [ "$1" = --help ] || [ "$1" = -h ]; then
            usage
            exit 0
        elif [[ $1 = --* && $names = *" ${1#--} "* ]]; then
            [ $# -ge 2 ] || die "$1 needs a value"
            printf -v "${1#--}" %s "$2"
            shift 2
        else
            if [[ ${#words[@]} -lt 2 && $1 != -* ]]; then words+=("$1"); else rest+=("$1"); fi
            shift
        fi
    done
}
# whole NAME...: each variable is empty or a whole number
whole() {
    local name
    for name in "$@"; do
        [[ ${!name:-0} =~ ^[0-9]+$ ]] || die "--${name//_/-} ${!name}: must be a whole number"
    done
}

exec 3>&1
# Shows a command, wherever its own output goes, then runs it; with DRY_RUN=1 it only shows.
run() {
    printf '+ %s\n' "$(printf '%q ' "$@")" >&3
    [ -n "${DRY_RUN:-}" ] || "$@"
}
# produce FILE COMMAND: the output of a shell command as FILE, whole or not at all; what is there is kept.
produce() {
    [ ! -f "$1" ] || return 0
    printf '+ %s > %q\n' "$2" "$1" >&3
    [ -z "${DRY_RUN:-}" ] || return 0
    if ! bash -euo pipefail -c "$2" > "$1.part" 2> "$1.err"; then
        rm -f "$1.part"
        die "$1 was not made: $(grep -v '^ *$' "$1.err" | tail -n 1)"
    fi
    rm -f "$1.err"
    mv "$1.part" "$1"
}
# download URL FILE MEND: goes on where an earlier call was cut off
download() {
    local errors
    errors=$(mktemp)
    run curl --fail --location --silent --show-error --retry 3 --continue-at - --output "$2" "$1" 2> "$errors" ||
        die "$1: cannot be downloaded ($(tail -n 1 "$errors")); call again to go on, or $3"
    rm -f "$errors"
}
# settings FILE LINE...: writes them, or stops where the folder was made with others.
settings() {
    local file=$1 lines
    shift
    lines=$(printf '%s\n' "$@")
    [ -z "${DRY_RUN:-}" ] || return 0
    if [ -f "$file" ]; then
        [ "$(cat "$file")" = "$lines" ] ||
            die "$(dirname "$file") was made with other settings ($(diff "$file" - <<< "$lines" | sed -n 's/^< //p' | paste -sd ' ')); give another folder, or remove it"
    fi
    mkdir -p "$(dirname "$file")"
    printf '%s\n' "$lines" > "$file"
}

if [ -d "$root/.venv" ]; then
    PATH="$root/.venv/bin:$PATH"
fi

# the paper's models, fairseq's own first, as the other scripts name them
# shellcheck disable=SC2034
variants="transformer $(sed -n '/^VARIANTS/,/^)/s/^ *"\(.*\)",$/\1/p' "$root/fairseq_synth/architectures.py" | tr '+\n' '_ ')"
# architecture VARIANT PRESET: its name for --arch
architecture() {
    if [ "$1" = transformer ]; then echo "transformer_$2"; else echo "transformer_synth_$1_$2"; fi
}
# one_of NAME "CHOICES": the value of $NAME, or of each word in it, is one of them
one_of() {
    local word
    for word in ${!1}; do
        [[ " $2 " = *" $word "* ]] || die "--${1//_/-} $word: choose one of ${2% }"
    done
}
