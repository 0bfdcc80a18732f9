#!/usr/bin/env bash
# Trains an architecture on prepared data: on this machine's GPUs, on those of several machines, or on its CPU.
#
#   scripts/train.sh ARCH PAIR [options] [-- flags for fairseq-train]
#
#   ARCH   transformer_synth_random_vanilla_wmt_en_de and the like, or fairseq's own: transformer_wmt_en_de,
#          transformer_wmt_en_de_big, transformer_multi30k. Its ending chooses the recipe.
#   PAIR   en-de or en-fr; with --data any
#
#   --data DIR          prepared data (default: data/wmt14-PAIR, or data/multi30k-PAIR)
#   --save-dir DIR      checkpoints and the log (default: runs/ARCH-PAIR-seedN)
#   --gpus N            of this machine (default: all there are); 0 trains on the CPU
#   --processes N       with --gpus 0, how many (default: 1)
#   --nodes N           machines (default: 1). Call the script on each of them, with
#   --rendezvous H:P    the first machine's name and a free port of it
#   --timeout N         seconds without progress after which a process ends, and so the run (default: 600)
#   --batch-tokens N    tokens of one update, all processes together (default: 32768; multi30k 8192). A sentence
#                       counts as the longer of its sides, and as the longest of its batch
#   --max-tokens N      most of them at once in one process: lower it if memory runs out (default: 4096)
#   --max-update N      (default: 100000; multi30k 8000)
#   --save-every N      updates between checkpoints (default: 1500; multi30k: each epoch); the last 10 are kept
#   --precision NAME    fp32, fp16 or bf16 (default: bf16 where the GPU computes in it, else fp16; fp32 on a CPU)
#   --seed N            (default: 1)
#   --tensorboard DIR   write curves there
#   --wandb PROJECT     send curves there
#
# The batch stays the same for any number of GPUs: --update-freq and, where it does not divide, --max-tokens follow.
# Stop it at any time; the same command goes on from the last checkpoint. DRY_RUN=1 shows the command only.
set -euo pipefail
source "$(dirname "$0")/common.sh"

data='' save_dir='' gpus='' processes=1 nodes=1 rendezvous='' timeout=600 batch_tokens='' max_tokens=4096 max_update=''
save_every='' precision='' seed=1 tensorboard='' wandb=''
options "data save-dir gpus processes nodes rendezvous timeout batch-tokens max-tokens max-update save-every precision seed tensorboard wandb" "$@"
[ ${#words[@]} = 2 ] || die "usage: scripts/train.sh ARCH PAIR [options] [-- flags for fairseq-train]; see $0 --help"
arch=${words[0]} pair=${words[1]}
[[ $pair =~ ^[A-Za-z_]+-[A-Za-z_]+$ ]] || die "$pair: a pair of languages is wanted, such as en-de"
[ -n "$data" ] || [ "$pair" = en-de ] || [ "$pair" = en-fr ] ||
    die "$pair: en-de and en-fr have data of their own; for another pair name what prepare.sh made by --data"
whole 0 gpus seed
whole 1 processes nodes timeout batch_tokens max_tokens max_update save_every
command -v fairseq-train > /dev/null || die "fairseq is not installed here; run scripts/setup.sh"

# Wu et al. 2021 (arXiv 2105.14462) for multi30k; fairseq's usual settings for WMT, as the paper's are not known
flags=(--optimizer adam --adam-betas '(0.9, 0.98)' --lr-scheduler inverse_sqrt --warmup-init-lr 1e-7
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1 --share-all-embeddings)
case $arch in
    *_multi30k)
        corpus=multi30k preset=multi30k longest=100
        flags+=(--lr 5e-3 --warmup-updates 2000 --dropout 0.3)
        : "${batch_tokens:=8192}" "${max_update:=8000}" ;;
    *_wmt_en_de_big)
        corpus=wmt14 preset=wmt_en_de_big longest=256
        flags+=(--lr 5e-4 --warmup-updates 4000 --dropout 0.3)
        : "${batch_tokens:=32768}" "${max_update:=100000}" "${save_every:=1500}" ;;
    *_wmt_en_de | *_wmt_en_fr)
        corpus=wmt14 preset=wmt_${arch##*_wmt_} longest=256
        flags+=(--lr 7e-4 --warmup-updates 4000 --dropout 0.1)
        : "${batch_tokens:=32768}" "${max_update:=100000}" "${save_every:=1500}" ;;
    *) die "$arch: no recipe; an architecture that ends in wmt_en_de, wmt_en_fr, wmt_en_de_big or multi30k has one" ;;
esac
case $arch in
    transformer_synth_*)
        variant=${arch#transformer_synth_} known=" ${variants#transformer } "
        [[ $known = *" ${variant%_"$preset"} "* ]] ||
            die "$arch: no such architecture; transformer_synth_NAME_$preset are there for ${known// /, }" ;;
esac
if [ -n "$save_every" ]; then
    flags+=(--save-interval-updates "$save_every" --keep-interval-updates 10 --no-epoch-checkpoints)
else
    flags+=(--keep-last-epochs 10 --patience 10)
fi
made_by="prepare.sh"
[ -n "$data" ] || made_by="prepare_$corpus.sh ${pair#*-}" data=$root/data/$corpus-$pair
save=${save_dir:-$root/runs/$arch-$pair-seed$seed}
[ -n "${DRY_RUN:-}" ] || [ -f "$data/bin/done" ] ||
    die "--data $data: not prepared, or not to its end; run scripts/$made_by $data"

if [ "$gpus" != 0 ]; then
    read -r found best < <(python -c 'import torch
n = torch.cuda.device_count()
print(n, "bf16" if n and torch.cuda.get_device_capability() >= (8, 0) else "fp16")') || die "torch does not import; run scripts/setup.sh"
    [ -n "$gpus" ] || [ "$found" -gt 0 ] ||
        die "--gpus: none found here; --gpus 0 trains on the CPU, and with DRY_RUN=1 --gpus 8 shows the command for 8"
    gpus=${gpus:-$found}
    [ -n "${DRY_RUN:-}" ] || [ "$gpus" -le "$found" ] || die "--gpus $gpus: this machine has $found"
fi
if [ "$gpus" -gt 0 ]; then
    [ "$processes" = 1 ] || die "--processes $processes: is for --gpus 0; every GPU has one process"
    processes=$gpus
else
    flags+=(--cpu)
    [ "${precision:=fp32}" != fp16 ] || die "--precision fp16: needs a GPU; on a CPU choose fp32 or bf16"
fi
case ${precision:=$best} in
    fp32) ;;
    fp16 | bf16) flags+=("--$precision") ;;
    *) die "--precision $precision: choose fp32, fp16 or bf16" ;;
esac
world=$((nodes * processes))
# as few passes as fit, each as large as the batch then needs
passes=$(((batch_tokens + world * max_tokens - 1) / (world * max_tokens)))
max_tokens=$((batch_tokens / (world * passes)))
[ "$max_tokens" -ge "$longest" ] ||
    die "--batch-tokens $batch_tokens: leaves $max_tokens for each of $world processes at a time, less than a sentence of $longest; raise it"
flags+=(--max-tokens "$max_tokens" --update-freq "$passes")

if [ -n "$tensorboard" ]; then
    # fairseq takes either
    python -c 'import torch.utils.tensorboard' 2> /dev/null || python -c 'import tensorboardX' 2> /dev/null ||
        die "--tensorboard: not installed; run pip install tensorboard"
    flags+=(--tensorboard-logdir "$tensorboard")
fi
if [ -n "$wandb" ]; then
    python -c 'import wandb' 2> /dev/null || die "--wandb: not installed; run pip install wandb"
    flags+=(--wandb-project "$wandb")
fi

launch=(fairseq-train)
# without it fairseq counts this machine's GPUs: too many for --gpus 1, and with one in each of several machines each
# would train alone
flags+=(--distributed-world-size "$world")
if [ "$world" -gt 1 ]; then
    if [ "$nodes" -gt 1 ]; then
        [[ $rendezvous = *:* ]] || die "--nodes $nodes: needs --rendezvous HOST:PORT, the first machine and a free port of it"
        launch=(torchrun --nnodes "$nodes" --rdzv-backend c10d --rdzv-endpoint "$rendezvous" --rdzv-id "$arch-$pair-$seed")
    else
        launch=(torchrun --standalone)
    fi
    launch+=(--nproc-per-node "$processes" --max-restarts 0 --no-python)
    flags+=(--heartbeat-timeout "$timeout")
    if [ "$gpus" = 0 ]; then
        launch+=("$root/scripts/cpu_worker.sh")
    else
        launch+=(fairseq-train)
    fi
fi

settings "$save/settings" "$save/checkpoint_last.pt" "arch=$arch" "pair=$pair" "data=$(realpath -m "$data")" \
    "batch_tokens=$batch_tokens" "seed=$seed" "flags=${rest[*]}"
train=("${launch[@]}" "$data/bin" --user-dir "$root/fairseq_synth" --arch "$arch" --source-lang "${pair%-*}"
    --target-lang "${pair#*-}" --save-dir "$save" --seed "$seed" --max-update "$max_update" "${flags[@]}"
    --no-progress-bar --log-interval 100 "${rest[@]}")
if [ -z "${DRY_RUN:-}" ]; then
    log=$save/train.log
    [ "$nodes" = 1 ] || log=$save/train.$HOSTNAME.log
    exec > >(tee -ai "$log") 2> >(tee -ai "$log" >&2)
fi
# in this process' place, so that a signal sent to it reaches the training
DRY_RUN=1 run "${train[@]}"
[ -n "${DRY_RUN:-}" ] || exec "${train[@]}"
