#!/usr/bin/env bash
# Makes the project's environment in .venv, or reuses it: the pinned stack of constraints.txt and this project.
# PYTHON chooses the interpreter (default: python3.11, then python3). The pinned stack is for Python 3.11; for another
# one that PYTHON names, 3.10 to 3.12, pip chooses the versions.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # called as sh scripts/setup.sh
set -euo pipefail
source "$(dirname "$(realpath "$0")")/common.sh"
usage "$0" "$@"
[ $# = 0 ] || die "$1: setup.sh takes no options; PYTHON chooses the interpreter"

stamp=$root/.venv/installed
wanted="$root $(cat "$root/setup.py" "$root/pyproject.toml" "$root/constraints.txt" | sha256sum)"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && "$root/.venv/bin/python" -c '' 2> /dev/null; then
    exit 0
fi
version() {
    "$1" -c 'import sys; print(*sys.version_info[:2], sep=".")' 2> /dev/null
}
python=
for candidate in ${PYTHON:-python3.11 python3 python}; do
    [ -n "$python" ] && break
    case $(version "$candidate") in
        3.11) python=$candidate ;;
        3.10 | 3.12) [ -z "${PYTHON:-}" ] || python=$candidate ;;
    esac
done
[ -n "$python" ] || die "Python 3.11 is needed for the pinned environment; install it, or name it: PYTHON=/path/to/python3.11 $0"
echo "== making the environment in .venv, once"
venv=("$python" -m venv)
case $(cat "$stamp" 2> /dev/null || true) in
    '' | "$root "*) ;;
    *) venv+=(--clear) ;; # it was moved or copied: its programs name the interpreter at the old place
esac
run "${venv[@]}" "$root/.venv"
pip=("$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check)
case $(version "$python") in
    3.11) run "${pip[@]}" -c "$root/constraints.txt" -e "${root}[dev]" ;;
    3.12) run "${pip[@]}" -e "${root}[dev]" ;;
    *) # newer versions of pip refuse the metadata of omegaconf 2.0, which fairseq 0.12.2 needs
        run "${pip[@]}" 'pip<24.1'
        run "${pip[@]}" -e "${root}[dev]"
        ;;
esac
[ -n "${DRY_RUN:-}" ] || printf '%s\n' "$wanted" > "$stamp"
