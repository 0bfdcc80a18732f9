#!/usr/bin/env bash
# Pictures and figures of what attention has learned in the trained models of a table. Options: --help
source "$(dirname "$(realpath "$0")")/common.sh"
recipe analyse "$@"
