# Shared by the scripts: the project's environment, and the recipes in Python. Source it.
# shellcheck shell=bash
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
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
    PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m recipes "$@"
}
