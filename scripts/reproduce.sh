#!/usr/bin/env bash
# Runs the cells of a results table. Options: --help
source "$(dirname "$0")/common.sh"
recipe reproduce "$@"
