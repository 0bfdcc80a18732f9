#!/usr/bin/env bash
# Translates sentences of standard input with a trained model. Options: --help
source "$(dirname "$(realpath "$0")")/common.sh"
recipe translate "$@"
