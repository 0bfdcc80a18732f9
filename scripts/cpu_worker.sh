#!/usr/bin/env bash
# One process of a training on CPUs, started by torchrun. On GPUs fairseq-train reads torchrun's variables itself;
# without GPUs it would divide by their number, 0.
set -euo pipefail
: "${RANK:?is said by torchrun, which train.sh --gpus 0 --processes N calls}"
exec fairseq-train "$@" --distributed-rank "$RANK" --distributed-init-method env:// --distributed-no-spawn \
    --device-id 0 --distributed-backend gloo --ddp-backend legacy_ddp
