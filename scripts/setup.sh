#!/usr/bin/env bash
# Makes the project's environment in .venv, or reuses it: the pinned stack of constraints.txt and this project.
# PYTHON chooses the interpreter (default: python3.11, then python3); it must be Python 3.11.
set -euo pipefail
source "$(dirname "$0")/common.sh"
[ $# = 0 ] || die "$1: setup.sh takes no options; PYTHON chooses the interpreter"

stamp=$root/.venv/installed
wanted="$root $(cat "$root/setup.py" "$root/constraints.txt" | sha256sum)"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && "$root/.venv/bin/python" -c '' 2> /dev/null; then
    exit 0
fi
python=
for candidate in ${PYTHON:-python3.11 python3 python}; do
    [ -n "$python" ] && break
    if [ "$("$candidate" -c 'import sys; print(*sys.version_info[:2], sep=".")' 2> /dev/null)" = 3.11 ]; then
        python=$candidate
    fi
done
[ -n "$python" ] || die "Python 3.11 is needed for the pinned environment; install it, or name it: PYTHON=/path/to/python3.11 $0"
echo "== making the environment in .venv, once"
run "$python" -m venv "$root/.venv"
run "$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" -e "${root}[dev]"
[ -n "${DRY_RUN:-}" ] || printf '%s\n' "$wanted" > "$stamp"
