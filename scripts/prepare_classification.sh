#!/usr/bin/env bash
# A corpus of text classification -> binarised data for fairseq-train. Options: --help
source "$(dirname "$0")/common.sh"
recipe prepare_classification "$@"
