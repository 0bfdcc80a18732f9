#!/usr/bin/env bash
# A corpus of language modelling -> binarised data for fairseq-train. Options: --help
source "$(dirname "$0")/common.sh"
recipe prepare_lm "$@"
