#!/usr/bin/env bash
# Averages the last update checkpoints of a run, translates the test set and scores it with sacreBLEU.
#
#   scripts/evaluate.sh DATA_DIR RUN_DIR SRC TGT [N]
#
# DATA_DIR is an OUT_DIR of prepare.sh, RUN_DIR the --save-dir of the training; N (5) checkpoints are averaged,
# beam 5, length penalty 1. Writes RUN_DIR/test.hyp.TGT, detokenised, and RUN_DIR/bleu.json with the signature.
set -euo pipefail
source "$(dirname "$0")/common.sh"

[ $# -ge 4 ] || die "usage: scripts/evaluate.sh DATA_DIR RUN_DIR SRC TGT [N]"
data=$1 out=$2 src=$3 tgt=$4 n=${5:-5}
[ -f "$data/bin/done" ] || die "$data: not prepared; run scripts/prepare.sh first"

say "averaging the last $n checkpoints"
run python "$root/scripts/average_checkpoints.py" --inputs "$out" --num-update-checkpoints "$n" \
    --output "$out/checkpoint_avg.pt" 2> "$out/average.log" || die "$(tail -n 1 "$out/average.log")"

say "translating the test set"
run fairseq-generate "$data/bin" --user-dir "$root/fairseq_synth" --path "$out/checkpoint_avg.pt" \
    --source-lang "$src" --target-lang "$tgt" --beam 5 --max-tokens 4096 --bpe subword_nmt \
    --bpe-codes "$data/codes" --tokenizer moses > "$out/generate.log" 2> "$out/generate.err" ||
    die "$(tail -n 1 "$out/generate.err")"
# D-7<tab>score<tab>detokenised hypothesis; back into the order of the corpus
sed -n 's/^D-//p' "$out/generate.log" | sort -n | cut -f 3- > "$out/test.hyp.$tgt"
[ "$(wc -l < "$out/test.hyp.$tgt")" = "$(wc -l < "$data/test.$tgt")" ] ||
    die "$out/test.hyp.$tgt: $(wc -l < "$out/test.hyp.$tgt") translations of $(wc -l < "$data/test.$tgt") sentences"

say "scoring"
run sacrebleu "$data/test.$tgt" -i "$out/test.hyp.$tgt" -l "$src-$tgt" -m bleu -w 2 > "$out/bleu.json"
python - "$out/bleu.json" <<'PYTHON'
import json, sys
bleu = json.load(open(sys.argv[1]))
print(f"BLEU {bleu['score']:.2f}   {bleu['signature']}")
PYTHON

say "three translations"
paste -d '\n' <(sed -n '1p;2p;3p' "$data/test.$src") <(sed -n '1p;2p;3p' "$out/test.hyp.$tgt") <(sed -n '1p;2p;3p' "$data/test.$tgt") |
    sed '1~3s/^/source:    /; 2~3s/^/output:    /; 3~3s/^/reference: /'
