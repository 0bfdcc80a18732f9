#!/usr/bin/env bash
# Trains an architecture on prepared data: on GPUs, on several machines, or on a CPU. Options: --help
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # called as sh scripts/train.sh
source "$(dirname "$(realpath "$0")")/common.sh"
recipe train "$@"
