#!/usr/bin/env bash
# Makes or reuses the environment and passes the tests, on all cores. Arguments go to pytest.
set -euo pipefail
here=$(dirname "$0")
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    sed -n '2s/^# //p' "$0"
    exit 0
fi
source "$here/common.sh"
"$here/setup.sh"
source "$here/common.sh"
cd "$root"
run python -m pytest -q -n auto "$@"
