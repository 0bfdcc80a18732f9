#!/usr/bin/env bash
# Sets up the environment in .venv if necessary, and runs the tests on all CPU cores.
#
#   scripts/test.sh                  runs the default tests, in about 10 minutes of CPU time
#   scripts/test.sh --kernels        also runs all tests of the GPU kernels in Triton's interpreter, with sentences of
#                                    all lengths. The default tests contain only a few tests of the kernels
#   scripts/test.sh --all            runs the tests of .ci/run, which also cover most calls of the kernels, torch.compile,
#                                    training in several new processes (torchrun, spawned workers), and the scripts in a
#                                    locale without UTF-8
#   scripts/test.sh --corpora=DIR    also runs the tests that read real text, from the subfolders multi30k, lm,
#                                    classification, glue, superglue, summarisation and dialogue of DIR. The environment
#                                    variable CORPORA has the same effect
#   scripts/test.sh -m "not slow"    leaves out the tests that take more than 15 seconds
#   scripts/test.sh -k padding       runs only the tests whose names contain this word
#   scripts/test.sh -k test_help     runs a single test, without worker processes, which starts in about ten seconds
#   scripts/test.sh tests/test_cli.py -n 0    runs one file, without worker processes
#
# All arguments are passed to pytest. For each failed test, the output ends with a command that repeats the test.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # called as sh scripts/test.sh
set -euo pipefail
here=$(dirname "$(realpath "$0")")
source "$here/common.sh"
usage "$0" "$@"
"$here/setup.sh"
source "$here/common.sh"
cd "$root"
# The tests start many processes. If this variable were set, each of them would compile the modules of the project again.
unset PYTHONDONTWRITEBYTECODE
run python -m pytest -q -n auto --dist worksteal "$@"
