#!/usr/bin/env bash
# Raw text -> binarised data for fairseq-train. Options: --help
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # called as sh scripts/prepare.sh
source "$(dirname "$(realpath "$0")")/common.sh"
recipe prepare "$@"
