#!/usr/bin/env bash
# Averages the last checkpoints of a training, translates the test set and scores it.
#
#   scripts/evaluate.sh DATA_DIR RUN_DIR [options]
#
#   DATA_DIR is what prepare*.sh made, RUN_DIR the --save-dir of the training.
#
#   --average N         checkpoints: the last of --save-interval-updates if there are, else epochs (default: 5)
#   --beam N            (default: 4)
#   --lenpen X          length penalty (default: 0.6)
#   --max-tokens N      batch of the search (default: 4096)
#   --baseline RUN_DIR  an evaluated run of the same data; adds a paired bootstrap test against it
#
# Writes to RUN_DIR, once all is there: test.hyp.TGT, the translations, detokenised; scores.json; bootstrap.json.
#   BLEU, chrF              of detokenised text by sacreBLEU, with the signature: the figures to compare
#   tokenised BLEU          as fairseq-generate would count it (BPE only)
#   compound-split BLEU     En-De only, tokenised, hyphens split: what the literature on WMT14 En-De reports since
#                           Vaswani et al.; higher than sacreBLEU's for the same output, so compared with no other
set -euo pipefail
source "$(dirname "$0")/common.sh"

average=5 beam=4 lenpen=0.6 max_tokens=4096 baseline=''
options "average beam lenpen max-tokens baseline" "$@"
[ ${#words[@]} = 2 ] || die "usage: scripts/evaluate.sh DATA_DIR RUN_DIR [options]; see $0 --help"
data=${words[0]%/} run=${words[1]%/}
whole 1 average beam max_tokens
[ -f "$data/bin/done" ] || die "$data: not prepared; run scripts/prepare.sh first"
[ -d "$run" ] || [ -n "${DRY_RUN:-}" ] || die "$run: no such folder; train with scripts/train.sh"
# what prepare.sh wrote there
setting() { sed -n "s/^$1=//p" "$data/settings"; }
src=$(setting src) tgt=$(setting tgt) subwords=$(setting subwords)
lowercase=$(setting lowercase)
lines=$(wc -l < "$data/test.$tgt")
[ -z "$baseline" ] || [ "$(cat "$baseline/test.hyp.$tgt" 2> /dev/null | wc -l)" = "$lines" ] ||
    die "--baseline $baseline: not evaluated yet, or not on these data"
# what train.sh wrote there
trained() { [ ! -f "$run/settings" ] || sed -n "s/^$1=//p" "$run/settings"; }
[[ $(trained pair) = @(|"$src-$tgt") ]] || die "$run: was trained for $(trained pair), and $data is $src-$tgt"
[[ $(trained data) = @(|"$(realpath "$data")") ]] ||
    die "$run: was trained on $(trained data), not on $data; if that folder was moved, mend its name in $run/settings"
# an earlier evaluation is kept until this one is whole
out=$run/evaluation.part
[ -n "${DRY_RUN:-}" ] || rm -rf "$out"
[ -n "${DRY_RUN:-}" ] || mkdir "$out"

say "averaging the last $average checkpoints"
kind=--num-epoch-checkpoints
compgen -G "$run/checkpoint_[0-9]*_[0-9]*.pt" > /dev/null && kind=--num-update-checkpoints
produce "$out/average.log" "python $(q "$root/scripts/average_checkpoints.py" --inputs "$run" $kind "$average" --output "$out/checkpoint_avg.pt")"

say "translating the test set"
decode=(--bpe subword_nmt --bpe-codes "$data/codes" --tokenizer moses)
[ "$subwords" = bpe ] || decode=(--bpe sentencepiece --sentencepiece-model "$data/pieces.model")
produce "$out/generate.log" "fairseq-generate $(q "$data/bin" --user-dir "$root/fairseq_synth" --path "$out/checkpoint_avg.pt" \
    --source-lang "$src" --target-lang "$tgt" --beam "$beam" --lenpen "$lenpen" --max-tokens "$max_tokens" "${decode[@]}")"
# D-7<tab>score<tab>detokenised hypothesis, H- in subwords; back into the order of the corpus
in_order() { echo "sed -n 's/^$1-//p' $(q "$out/generate.log")| sort -n | cut -f 3-"; }
produce "$out/test.hyp.$tgt" "$(in_order D)"
[ -n "${DRY_RUN:-}" ] || [ "$(wc -l < "$out/test.hyp.$tgt")" = "$lines" ] ||
    die "$out/test.hyp.$tgt: $(wc -l < "$out/test.hyp.$tgt") translations of $lines sentences"

say "scoring"
reference=("$data/test.$tgt" -l "$src-$tgt") testset=''
if [ -f "$data/sacrebleu_set" ]; then
    testset=$(cat "$data/sacrebleu_set") # its signature does not name it
    reference=(-t "$testset" -l "$src-$tgt")
    export SACREBLEU=$data/archives/sacrebleu # where prepare_wmt14.sh has it
fi
# figure NAME ARGUMENTS...: one of sacreBLEU's, as RUN_DIR/NAME.json
figure() { produce "$out/$1.json" "sacrebleu $(q "${@:2}") -w 2 -f json"; }
figure bleu "${reference[@]}" -i "$out/test.hyp.$tgt" -m bleu ${lowercase:+-lc}
figure chrf "${reference[@]}" -i "$out/test.hyp.$tgt" -m chrf ${lowercase:+--chrf-lowercase}
figures=(bleu chrf)
if [ "$subwords" = bpe ]; then
    produce "$out/test.tok.$tgt" "$(in_order H) | sed -E 's/(@@ )|(@@ ?\$)//g'"
    figure tokenised "$data/tok/test.$tgt" -i "$out/test.tok.$tgt" -m bleu --tokenize none --force
    figures+=(tokenised)
fi
if [ "$src-$tgt" = en-de ]; then
    split() { printf '%s\n' "sacremoses --quiet -l de tokenize < $(q "$1")| sed -E 's/(\S)-(\S)/\1 ##AT##-##AT## \2/g'"; }
    produce "$out/compound.ref" "$(split "$data/test.$tgt")"
    produce "$out/compound.hyp" "$(split "$out/test.hyp.$tgt")"
    figure compound_split "$out/compound.ref" -i "$out/compound.hyp" -m bleu --tokenize none --force
    figures+=(compound_split)
fi
if [ -n "$baseline" ]; then
    figure bootstrap "${reference[@]}" -i "$baseline/test.hyp.$tgt" "$out/test.hyp.$tgt" -m bleu ${lowercase:+-lc} --paired-bs
fi
[ -z "${DRY_RUN:-}" ] || exit 0
python - "$out" "$testset" "${figures[@]}" <<'PYTHON'
import json, sys
from pathlib import Path

run, testset, *names = sys.argv[1:]
scores = {name: json.loads(Path(run, f"{name}.json").read_text()) for name in names}
if testset:
    scores["bleu"]["test_set"] = scores["chrf"]["test_set"] = testset
Path(run, "scores.json").write_text(json.dumps(scores, indent=1) + "\n")
for name, label in dict(bleu="BLEU", chrf="chrF", tokenised="tokenised BLEU", compound_split="compound-split BLEU").items():
    if name in scores:
        named = scores[name]
        print(f"{label} {named['score']:.2f}   {' '.join([named['signature'], named.get('test_set', '')]).rstrip()}")
bootstrap = Path(run, "bootstrap.json")
if bootstrap.exists():
    base, ours = json.loads(bootstrap.read_text())
    bleu = next(key for key in ours if key.startswith("BLEU"))
    print(f"baseline {base[bleu]['score']:.2f}, this run {ours[bleu]['score']:.2f}, p = {ours[bleu]['p_value']:.4f} (paired bootstrap)")
PYTHON

rm -f "$run/bootstrap.json" # of an evaluation with a baseline before this one without
mv "$out"/* "$run/"
rmdir "$out"

say "three translations"
paste -d '\n' <(sed -n '1p;2p;3p' "$data/test.$src") <(sed -n '1p;2p;3p' "$run/test.hyp.$tgt") <(sed -n '1p;2p;3p' "$data/test.$tgt") |
    sed '1~3s/^/source:    /; 2~3s/^/output:    /; 3~3s/^/reference: /'
