#!/usr/bin/env bash
# Runs the cells of a results table. Options: --help
source "$(dirname "$(realpath "$0")")/common.sh"
recipe reproduce "$@"
