#!/usr/bin/env bash
# From raw text to BLEU and translations with a Synthesizer, in one command. Options: --help
source "$(dirname "$0")/common.sh"
recipe quickstart "$@"
