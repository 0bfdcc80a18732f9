#!/usr/bin/env bash
# Runs the cells of a results table. Options: --help
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # called as sh scripts/reproduce.sh
source "$(dirname "$(realpath "$0")")/common.sh"
recipe reproduce "$@"
