#!/usr/bin/env bash
# Translates sentences of standard input with a trained model. Options: --help
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # called as sh scripts/translate.sh
source "$(dirname "$(realpath "$0")")/common.sh"
recipe translate "$@"
