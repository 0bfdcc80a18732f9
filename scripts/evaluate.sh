#!/usr/bin/env bash
# Averages the last checkpoints of a training, translates the test set and scores it. Options: --help
source "$(dirname "$0")/common.sh"
recipe evaluate "$@"
