#!/usr/bin/env bash
# Raw text -> binarised data for fairseq-train. Options: --help
source "$(dirname "$(realpath "$0")")/common.sh"
recipe prepare "$@"
