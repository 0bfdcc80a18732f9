#!/usr/bin/env bash
# From raw text to BLEU and translations with a Synthesizer, in one command. Options: --help
source "$(dirname "$(realpath "$0")")/common.sh"
"$root/scripts/setup.sh" || die "scripts/setup.sh failed, see above"
source "$root/scripts/common.sh" # with the environment that may be new
recipe quickstart "$@"
