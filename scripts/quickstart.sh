#!/usr/bin/env bash
# From raw text to BLEU and translations with a Synthesizer, in one command.
#
#   scripts/quickstart.sh [options] [-- flags for fairseq-train]
#
#   --variant NAME      random_vanilla (default), random, dense, ... or transformer, fairseq's own
#   --data NAME         numbers (default; made on the spot, no network) or multi30k
#   --from DIR          folder of Multi30k's .gz files; without it they are downloaded
#   --pair PAIR         en-de (default) or en-fr
#   --max-update N      length of the training (default: 1600 for numbers, 3000 for multi30k)
#   --merges N          size of the joint BPE (default: 1000 for numbers, 4000 for multi30k)
#   --threads N         CPU threads of the training (default: all)
#   --seed N            (default: 1)
#   --out DIR           where everything goes (default: runs)
#
# A second call reuses the environment, the data and the checkpoints: training goes on where it stopped.
set -euo pipefail
source "$(dirname "$0")/common.sh"

variant=random_vanilla data=numbers from='' pair=en-de max_update='' merges='' threads='' seed=1 out=$root/runs
options "variant data from pair max-update merges threads seed out" "$@"
[ ${#words[@]} = 0 ] || die "${words[0]}: what is it? see $0 --help"
one_of data "numbers multi30k"
one_of pair "en-de en-fr"
one_of variant "$variants"
whole 1 max_update merges threads
whole 0 seed
case $data in
    numbers) : "${max_update:=1600}" "${merges:=1000}" ;;
    multi30k) : "${max_update:=3000}" "${merges:=4000}" ;;
esac
tgt=${pair#en-}
[ -z "$from" ] || [ -d "$from" ] || die "--from $from: no such folder"
"$root/scripts/setup.sh"
source "$root/scripts/common.sh" # .venv may be new
corpus=$out/$data-$pair-bpe$merges
save=$out/$data-$pair-bpe$merges-$variant-seed$seed

if [ "$data" = numbers ]; then
    if [ ! -f "$corpus/bin/done" ]; then
        say "making the corpus of numbers, dates and quantities"
        run python "$root/scripts/make_numbers.py" en "$tgt" "$corpus-raw"
    fi
    "$root/scripts/prepare.sh" "$corpus-raw" en "$tgt" "$corpus" --merges "$merges"
else
    "$root/scripts/prepare_multi30k.sh" "$tgt" "$corpus" ${from:+--from "$from"} --merges "$merges"
fi

settings "$save/quickstart" "$save/checkpoint_last.pt" "max_update=$max_update" "flags=${rest[*]}"
if [ -f "$save/summary" ]; then
    say "trained and scored already: $save"
    cat "$save/summary"
    exit 0
fi
arch=$(architecture "$variant" multi30k)
say "training $arch for $max_update updates (log: $save/train.log)"
[ -z "$threads" ] || export OMP_NUM_THREADS=$threads
interval=$((max_update / 20 > 0 ? max_update / 20 : 1))
"$root/scripts/train.sh" "$arch" "$pair" --data "$corpus" --save-dir "$save" --seed "$seed" --max-update "$max_update" \
    --gpus "$(python -c 'import torch; print(min(1, torch.cuda.device_count()))')" --batch-tokens 1024 \
    --save-every "$interval" -- --lr 3e-3 --warmup-updates $((max_update / 3)) --dropout 0.1 --clip-norm 1.0 \
    --num-workers 0 --validate-after-updates $((max_update * 3 / 4)) --log-interval "$interval" "${rest[@]}" 2>&1 |
    sed -unE -e 's/.*train_inner.* ppl=([0-9.]+),.* num_updates=([0-9]+),.* wall=([0-9]+).*/  update \2: training perplexity \1, \3 s/p' \
        -e '/^\+ |Loaded checkpoint|rror:/{s/.* \| //;p}' || die "the training failed; see $save/train.log"

evaluate=("$root/scripts/evaluate.sh" "$corpus" "$save" --beam 5 --lenpen 1)
[ -z "${DRY_RUN:-}" ] || exec "${evaluate[@]}"
"${evaluate[@]}" | tee "$save/summary.part"
mv "$save/summary.part" "$save/summary"
