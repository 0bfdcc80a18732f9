#!/usr/bin/env bash
# Runs the cells of a results table that nobody has run: data, training, averaging, translation, scores, JSON.
#
#   scripts/reproduce.sh TABLE [options] [-- options of train.sh [-- flags for fairseq-train]]
#
#   TABLE   table2        the paper's Table 2: WMT14 En-De and En-Fr, base models
#           multi30k      the same models in small, by the recipe of Wu et al. 2021, minutes each on a GPU
#           multi30k_cpu  the same with a ninth of the training, for one CPU thread: some 25 minutes each
#
#   --pair PAIRS        en-de, en-fr or "en-de en-fr" (default: both)
#   --variant NAMES     random_vanilla, "transformer random" … (default: fairseq's Transformer and all the paper's)
#   --seed NUMBERS      (default: 1; multi30k "1 2 3")
#   --from DIR          corpora at hand, for prepare_wmt14.sh --from or prepare_multi30k.sh
#   --out DIR           data and runs (default: the project's folder)
#   --rerun             run a cell again although results/ has it
#
# What stands after -- goes to train.sh, and what stands after a second -- to fairseq-train. A run with a recipe so
# changed is no cell: it is recorded beside its checkpoints. Only options about the machine leave the recipe as it is.
# Every step is kept, so that a second call goes on where the first one stopped. Each cell ends as
# results/TABLE/PAIR-VARIANT-seedN.json; then scripts/make_tables.py renders README.md. DRY_RUN=1 shows the commands.
set -euo pipefail
source "$(dirname "$0")/common.sh"

pair="en-de en-fr" variant='' seed='' from='' out=$root rerun=''
options "pair variant seed from out rerun!" "$@"
[ ${#words[@]} = 1 ] || die "usage: scripts/reproduce.sh TABLE [options]; see $0 --help"
table=${words[0]}
one_of pair "en-de en-fr"
for word in $seed; do [[ $word =~ ^[0-9]+$ ]] || die "--seed $word: must be a whole number"; done
given=("${rest[@]}") flags=()
for i in "${!rest[@]}"; do
    if [ "${rest[i]}" = -- ]; then
        given=("${rest[@]:0:i}") flags=("${rest[@]:i+1}")
        break
    fi
done
changed=''
for option in "${given[@]}"; do
    [[ $option != --* || $option = @(--gpus|--processes|--nodes|--rendezvous|--timeout|--max-tokens|--precision|--tensorboard|--wandb) ]] || changed=1
done
[ ${#flags[@]} = 0 ] || changed=1
training=() recipe=() scoring=(--average 10 --beam 5 --lenpen 1) text=(--merges 10000 --lowercase)
case $table in
    table2)
        corpus=wmt14 scoring=() text=()
        # the rows of the paper's
        : "${variant:=transformer fixed_random random factorized_random dense factorized_dense random_dense dense_vanilla random_vanilla}" ;;
    multi30k)
        corpus=multi30k
        : "${seed:=1 2 3}" ;;
    multi30k_cpu)
        corpus=multi30k
        : "${seed:=1 2 3}"
        export OMP_NUM_THREADS=1 # the number of threads changes the rounding, and so the figures
        text=(--merges 4000 --lowercase) scoring=(--average 5 --beam 5 --lenpen 1)
        training=(--gpus 0 --batch-tokens 1024 --max-update 7000 --save-every 350)
        # validated with every save, and not with every epoch too
        recipe=(--lr 3e-3 --warmup-updates 1500 --dropout 0.1 --clip-norm 1.0 --num-workers 0 --validate-interval 1000) ;;
    *) die "$table: choose table2, multi30k or multi30k_cpu" ;;
esac
: "${seed:=1}" "${variant:=${variants/ vanilla / }}" # fairseq's own is the same model
one_of variant "$variants"

for p in $pair; do
    data=$out/data/${table/table2/wmt14}-$p
    "$root/scripts/prepare_$corpus.sh" "${p#en-}" "$data" ${from:+--from "$from"} "${text[@]}"
    for s in $seed; do
        for v in $variant; do
            run=$out/runs/$table-$p-$v-seed$s${changed:+-changed} result=$root/results/$table/$p-$v-seed$s.json
            [ -z "$changed" ] || result=$run/result.json
            if [ -f "$result" ] && [ -z "$rerun" ]; then
                say "$result is there; --rerun runs it again"
                continue
            fi
            preset=multi30k
            [ "$corpus" = multi30k ] || preset=wmt_${p/-/_}
            # fairseq knows no other base Transformer for En-Fr
            [ "$v-$preset" != transformer-wmt_en_fr ] || preset=wmt_en_de
            say "$p, $v, seed $s"
            # a cell that was scored is begun anew, one that was interrupted goes on
            [ ! -f "$run/scores.json" ] || [ ! -f "$result" ] || run rm -rf "$run"
            settings "$run/cell" "$run/trained" "options=${changed:+${rest[*]}}"
            if [ ! -f "$run/trained" ]; then
                "$root/scripts/train.sh" "$(architecture "$v" "$preset")" "$p" --data "$data" --save-dir "$run" \
                    --seed "$s" "${training[@]}" "${given[@]}" -- "${recipe[@]}" "${flags[@]}"
                [ -n "${DRY_RUN:-}" ] || touch "$run/trained"
            fi
            baseline=$out/runs/$table-$p-transformer-seed$s
            [ "$v" != transformer ] && [ -f "$baseline/scores.json" ] || baseline=''
            run "$root/scripts/evaluate.sh" "$data" "$run" "${scoring[@]}" ${baseline:+--baseline "$baseline"}
            run python "$root/scripts/record_result.py" "$run" "$result" --variant "$v" --data "$corpus" --pair "$p" \
                --seed "$s" --command "scripts/reproduce.sh $table --pair $p --variant $v --seed $s --rerun${rest[*]:+ -- ${rest[*]}}"
        done
    done
done
