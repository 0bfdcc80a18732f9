#!/usr/bin/env bash
# Makes or reuses the environment and runs the tests, on all cores. Arguments go to pytest.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # called as sh scripts/test.sh
set -euo pipefail
here=$(dirname "$(realpath "$0")")
source "$here/common.sh"
usage "$0" "$@"
"$here/setup.sh"
source "$here/common.sh"
cd "$root"
run python -m pytest -q -n auto --dist worksteal "$@"
