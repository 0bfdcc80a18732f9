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
# after_words "NAME ..." "$@": two words first, which become `words`; of what follows these options are taken as by
# `options`, and all else becomes `rest`
after_words() {
    local names=" $1 "
    shift
    case ${1:-} in --help | -h) usage; exit 0 ;; esac
    [[ $# -ge 2 && $1 != -* && $2 != -* ]] || die "usage: $(usage | sed -n '/^  scripts/{s/^ *//p;q}'); see $0 --help"
    words=("$1" "${2%/}") rest=()
    shift 2
    while [ $# -gt 0 ]; do
        if [[ $1 = --* && $names = *" ${1#--} "* ]]; then
            [ $# -ge 2 ] || die "$1 needs a value"
            printf -v "${1#--}" %s "$2"
            shift 2
        else
            rest+=("$1")
            shift
        fi
    done
}
# whole MIN NAME...: each variable is empty or a whole number from MIN on
whole() {
    local min=$1 name
    shift
    for name in "$@"; do
        [[ ${!name:-$min} =~ ^(0|[1-9][0-9]*)$ && ${!name:-$min} -ge $min ]] ||
            die "--${name//_/-} ${!name}: must be a whole number, at least $min"
    done
}

# folder DIR: makes it
folder() { mkdir -p "$1" 2> /dev/null || die "$1: this folder cannot be made; name another one"; }
# q WORD...: quoted for the shell of `produce`
q() { printf '%q ' "$@"; }

exec 3>&1
# Shows a command, wherever its own output goes, then runs it; with DRY_RUN=1 it only shows.
run() {
    printf '+ %s\n' "$(printf '%q ' "$@")" >&3
    [ -n "${DRY_RUN:-}" ] || "$@"
}
# produce FILE COMMAND [MEND]: the output of a shell command as FILE, whole or not at all; what is there is kept
produce() {
    local errors
    [ ! -f "$1" ] || return 0
    printf '+ %s > %q\n' "$2" "$1" >&3
    [ -z "${DRY_RUN:-}" ] || return 0
    if ! errors=$(bash -euo pipefail -c "$2" 2>&1 > "$1.part" | tail -n 30); then
        rm -f "$1.part"
        # the last line that speaks of an error, else the last
        die "$1 was not made: $(awk 'NF { last = $0 } /[Ee]rror|FATAL|Fatal/ { told = $0 } END { print told ? told : last }' <<< "$errors" |
            sed 's/^.*fairseq_synth: error: //; s/^error: //')${3:+; $3}"
    fi
    mv "$1.part" "$1"
}
# download URL FILE MEND: goes on where an earlier call was cut off
download() {
    local errors
    printf '+ curl --fail --location --continue-at - --output %q %s\n' "$2" "$1" >&3
    [ -z "${DRY_RUN:-}" ] || return 0
    if ! errors=$(curl --fail --location --silent --show-error --retry 3 --continue-at - --output "$2.part" "$1" 2>&1); then
        [[ $errors != *416* ]] || rm -f "$2.part" # more than the whole file
        die "$1: cannot be downloaded (${errors##*$'\n'}); call again to go on, or $3"
    fi
    mv "$2.part" "$2"
}
# settings FILE WITNESS LINE...: keeps the lines, or stops where WITNESS, a file or pattern, was made with others.
settings() {
    local file=$1 witness=$2 lines
    shift 2
    lines=$(printf '%s\n' "$@")
    [ -z "${DRY_RUN:-}" ] || return 0
    if [ -f "$file" ]; then
        [ "$(cat "$file")" != "$lines" ] || return 0
        compgen -G "$witness" > /dev/null &&
            die "$(dirname "$file") was made with other settings ($(diff "$file" - <<< "$lines" | sed -n 's/^< /it has /p; s/^> /asked for /p' | paste -sd ';')); give another folder, or remove it"
    fi
    folder "$(dirname "$file")"
    # whole or not at all: several machines may do this at once
    printf '%s\n' "$lines" > "$file.$HOSTNAME.$$"
    mv "$file.$HOSTNAME.$$" "$file"
}

# alone DIR: waits until no other call works there
alone() {
    [ -z "${DRY_RUN:-}" ] || return 0
    folder "$1"
    exec {lock}> "$1/.lock"
    flock -n "$lock" || {
        say "another call is at work in $1; waiting for it"
        flock "$lock"
    }
}
# this machine's, which nproc tells from the threads that OpenMP is to use
cores() { env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc; }

# on CPUs: threads that spin while they wait slow a training tenfold where another program wants one of the cores
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}

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
    [ -n "${!1// /}" ] || die "--${1//_/-}: empty; choose one of ${2% }"
    for word in ${!1}; do
        [[ " $2 " = *" $word "* ]] || die "--${1//_/-} $word: choose one of ${2% }"
    done
}
