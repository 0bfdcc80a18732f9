#!/usr/bin/env bash
# Makes or reuses the environment in .venv and runs the tests on all cores.
#
#   scripts/test.sh                  the default tests: about 10 minutes of CPU time
#   scripts/test.sh --kernels        also all tests of the GPU kernels, which are off by default, with all lengths of a
#                                    sentence. They run in Triton's interpreter. Without an option a few chosen calls run.
#   scripts/test.sh --all            everything that .ci/run runs: most tests of the kernels, with one length of a sentence
#                                    each, torch.compile, and trainings in several fresh processes (torchrun, spawned
#                                    workers)
#   scripts/test.sh --corpora=DIR    also the tests that read real text: subfolders multi30k, lm, classification, glue,
#                                    superglue, summarisation and dialogue of DIR. The variable CORPORA does the same.
#   scripts/test.sh -m "not slow"    without the tests that take more than 15 seconds
#   scripts/test.sh -k padding       only tests with this word in their names
#   scripts/test.sh -k test_help     a single test, without worker processes, so that it starts in some ten seconds
#   scripts/test.sh tests/test_cli.py -n 0    one file, without worker processes
#
# All arguments go to pytest. At the end, the commands that repeat failed tests are printed.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # called as sh scripts/test.sh
set -euo pipefail
here=$(dirname "$(realpath "$0")")
source "$here/common.sh"
usage "$0" "$@"
"$here/setup.sh"
source "$here/common.sh"
cd "$root"
run python -m pytest -q -n auto --dist worksteal "$@"
