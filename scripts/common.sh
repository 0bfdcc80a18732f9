# Shared by the scripts: the project's environment, and the recipes in Python. Source it.
# shellcheck shell=bash
[ "${DRY_RUN:-}" != 0 ] || unset DRY_RUN
# all text is UTF-8, whatever the locale is
export PYTHONUTF8=1
unset PYTHONIOENCODING
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}
# usage SCRIPT ARGUMENTS...: with --help prints the script's first comment, and ends
usage() {
    case ${2:-} in
        --help | -h) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$1" && exit 0 ;;
    esac
}
# Shows a command, then runs it; with DRY_RUN=1 it only shows.
run() {
    printf '+ %s\n' "$(printf '%q ' "$@")"
    [ -n "${DRY_RUN:-}" ] || "$@"
}
if [ -d "$root/.venv" ]; then
    PATH="$root/.venv/bin:$PATH"
fi
# recipe NAME ARGUMENTS...: a command of recipes/, in this process' place
recipe() {
    local python=python
    command -v python > /dev/null || python=python3
    PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" "$root/scripts/recipe.py" "$@"
}
