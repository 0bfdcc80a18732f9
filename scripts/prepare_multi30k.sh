#!/usr/bin/env bash
# Multi30k -> binarised data for fairseq-train. Options: --help
source "$(dirname "$0")/common.sh"
recipe prepare_multi30k "$@"
