#!/usr/bin/env bash
# Trains an architecture on prepared data: on GPUs, on several machines, or on a CPU. Options: --help
source "$(dirname "$(realpath "$0")")/common.sh"
recipe train "$@"
