#!/usr/bin/env bash
# Runs one process of a training on CPUs; torchrun starts it. On GPUs fairseq-train reads torchrun's variables itself,
# but without GPUs it would divide by their number, 0.
set -euo pipefail
: "${RANK:?is set by torchrun; call train.sh --gpus 0 --processes N instead}"
exec fairseq-train "$@" --distributed-rank "$RANK" --distributed-init-method env:// --distributed-no-spawn \
    --device-id 0 --distributed-backend gloo --ddp-backend legacy_ddp
