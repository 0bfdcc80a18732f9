# Shared by the scripts: the project's environment, and how they speak. Source it.
# shellcheck shell=bash
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '\n== %s\n' "$*"; }
die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}
exec 3>&1
# shows a command, wherever its own output goes, then runs it
run() {
    printf '+ %s\n' "$(printf '%q ' "$@")" >&3
    "$@"
}

if [ -d "$root/.venv" ]; then
    PATH="$root/.venv/bin:$PATH"
fi
