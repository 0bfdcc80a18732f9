#!/usr/bin/env bash
# WMT14 En-De or En-Fr, from the download to binarised data for fairseq-train. Options: --help
source "$(dirname "$0")/common.sh"
recipe prepare_wmt14 "$@"
