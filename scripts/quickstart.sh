#!/usr/bin/env bash
# From raw text to BLEU and translations with a Synthesizer, in one command.
#
#   scripts/quickstart.sh [options] [-- flags for fairseq-train]
#
#   --variant NAME      random_vanilla (default), random, dense, ... or transformer, fairseq's own
#   --data NAME         numbers (default; made on the spot, no network) or multi30k
#   --data-dir DIR      folder of Multi30k's .gz files; without it they are downloaded
#   --pair PAIR         en-de (default) or en-fr
#   --max-update N      length of the training (default: 1600 for numbers, 3000 for multi30k)
#   --merges N          size of the joint BPE (default: 1000 for numbers, 4000 for multi30k)
#   --threads N         CPU threads of the training (default: all)
#   --seed N            (default: 1)
#   --out DIR           where everything goes (default: runs)
#
# A second call reuses the environment, the data and the checkpoints: training goes on where it stopped.
set -euo pipefail
here=$(dirname "$0")
# what a result is recorded with: where its files lie changes nothing
command="scripts/quickstart.sh"
variant=random_vanilla data=numbers data_dir='' pair=en-de max_update='' merges='' threads='' seed=1 out=''
while [ $# -gt 0 ]; do
    case $1 in
        --help | -h) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0 ;;
        --) command="$command $*"; shift; break ;;
        --variant | --data | --data-dir | --pair | --max-update | --merges | --threads | --seed | --out)
            [ $# -ge 2 ] || { echo "error: $1 needs a value" >&2; exit 2; }
            name=${1#--}; printf -v "${name//-/_}" %s "$2"
            case $1 in --out | --data-dir) ;; *) command="$command $1 $2" ;; esac
            shift 2 ;;
        *) echo "error: unknown option $1; see $0 --help" >&2; exit 2 ;;
    esac
done
source "$here/common.sh"
case $data in
    numbers) : "${max_update:=1600}" "${merges:=1000}" ;;
    multi30k) : "${max_update:=3000}" "${merges:=4000}" ;;
    *) die "--data $data: choose numbers or multi30k" ;;
esac
case $pair in en-de | en-fr) tgt=${pair#en-} ;; *) die "--pair $pair: choose en-de or en-fr" ;; esac
variants=$(sed -n '/^VARIANTS/,/^)/s/^ *"\(.*\)",$/\1/p' "$root/fairseq_synth/architectures.py" | tr '+\n' '_ ')
[[ " transformer $variants" = *" $variant "* ]] || die "--variant $variant: choose one of transformer $variants"
for name in max_update merges seed threads; do
    [[ ${!name:-0} =~ ^[0-9]+$ ]] || die "--${name//_/-} ${!name}: must be a whole number"
done
[ -z "$data_dir" ] || [ -d "$data_dir" ] || die "--data-dir $data_dir: no such folder"
"$here/setup.sh"
source "$here/common.sh" # .venv may be new
out=${out:-$root/runs}
corpus=$out/$data-$pair-bpe$merges
save=$out/$data-$pair-bpe$merges-$variant-seed$seed

if [ "$variant" = transformer ]; then
    arch=transformer_multi30k
else
    arch=transformer_synth_${variant}_multi30k
fi
if [ $data = numbers ]; then
    if [ ! -f "$corpus/bin/done" ]; then
        say "making the corpus of numbers, dates and quantities"
        python "$here/make_numbers.py" en "$tgt" "$corpus-raw"
        "$here/prepare.sh" "$corpus-raw" en "$tgt" "$corpus" "$merges"
    fi
else
    "$here/prepare_multi30k.sh" "$tgt" "$corpus" "$data_dir" "$merges"
fi

mkdir -p "$save"
settings="$arch $data $pair $merges merges $max_update updates seed $seed $*"
[ ! -f "$save/settings" ] || [ "$(cat "$save/settings")" = "$settings" ] ||
    die "$save was trained with other settings ($(cat "$save/settings")); give another --out, or remove it"
printf '%s\n' "$settings" > "$save/settings"
if [ -f "$save/result.json" ]; then
    say "trained and scored already: $save"
    cat "$save/summary"
    exit 0
fi
if [ ! -f "$save/trained" ]; then
    say "training $arch for $max_update updates (log: $save/train.log)"
    [ -z "$threads" ] || export OMP_NUM_THREADS=$threads
    interval=$((max_update / 20 > 0 ? max_update / 20 : 1))
    run fairseq-train "$corpus/bin" --user-dir "$root/fairseq_synth" --arch "$arch" --share-all-embeddings \
        --source-lang en --target-lang "$tgt" --save-dir "$save" --seed "$seed" \
        --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 1.0 --lr 3e-3 --lr-scheduler inverse_sqrt \
        --warmup-updates $((max_update / 3)) --dropout 0.1 --criterion label_smoothed_cross_entropy \
        --label-smoothing 0.1 --max-tokens 1024 --max-update "$max_update" --num-workers 0 \
        --save-interval-updates "$interval" --keep-interval-updates 5 --no-epoch-checkpoints \
        --validate-after-updates $((max_update * 3 / 4)) --no-progress-bar --log-interval "$interval" "$@" 2>&1 |
        tee -a "$save/train.log" | sed -unE \
        -e 's/.*train_inner.* ppl=([0-9.]+),.* num_updates=([0-9]+),.* wall=([0-9]+).*/  update \2: training perplexity \1, \3 s/p' \
        -e '/Loaded checkpoint|rror:/{s/.* \| //;p}'
    touch "$save/trained"
fi

"$here/evaluate.sh" "$corpus" "$save" en "$tgt" | tee "$save/summary"
python "$here/record_result.py" "$save" --variant "$variant" --data "$data" --pair "$pair" --command "$command"
