#!/usr/bin/env bash
# Scores a trained model on the test set of its task. Options: --help
source "$(dirname "$(realpath "$0")")/common.sh"
recipe evaluate "$@"
