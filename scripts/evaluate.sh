#!/usr/bin/env bash
# Scores a trained model on the test set of its task. Options: --help
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # called as sh scripts/evaluate.sh
source "$(dirname "$(realpath "$0")")/common.sh"
recipe evaluate "$@"
