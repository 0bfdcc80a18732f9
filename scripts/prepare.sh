#!/usr/bin/env bash
# Raw parallel text -> binarised data for fairseq-train: normalise and tokenise (sacremoses), joint BPE
# (subword-nmt), fairseq-preprocess with a joined dictionary.
#
#   scripts/prepare.sh RAW_DIR SRC TGT OUT_DIR [MERGES]
#
# RAW_DIR holds {train,valid,test}.{SRC,TGT}, one sentence a line. OUT_DIR receives bin/ for fairseq-train,
# codes for --bpe-codes, and test.{SRC,TGT}, the raw test set to score against. A finished OUT_DIR is kept.
set -euo pipefail
source "$(dirname "$0")/common.sh"

[ $# -ge 4 ] || die "usage: scripts/prepare.sh RAW_DIR SRC TGT OUT_DIR [MERGES]"
raw=$1 src=$2 tgt=$3 out=$4 merges=${5:-10000}
[ -d "$raw" ] || die "$raw: no such folder; RAW_DIR holds {train,valid,test}.{$src,$tgt}"
if [ -f "$out/bin/done" ]; then
    say "$out is ready, reusing it"
    exit 0
fi
for split in train valid test; do
    for lang in "$src" "$tgt"; do
        [ -f "$raw/$split.$lang" ] || die "$raw/$split.$lang: no such file"
    done
    [ "$(wc -l < "$raw/$split.$src")" = "$(wc -l < "$raw/$split.$tgt")" ] ||
        die "$raw/$split.{$src,$tgt}: different numbers of lines; they must be aligned line by line"
done
rm -rf "${out:?}/tok" "${out:?}/bin" && mkdir -p "$out/tok"

say "tokenising $(wc -l < "$raw/train.$src") sentence pairs"
for split in train valid test; do
    for lang in "$src" "$tgt"; do
        sacremoses --quiet -l "$lang" normalize tokenize \
            < "$raw/$split.$lang" > "$out/tok/$split.tok.$lang"
        [ "$(wc -l < "$raw/$split.$lang")" = "$(wc -l < "$out/tok/$split.tok.$lang")" ] ||
            die "$raw/$split.$lang: tokenising changed the number of lines; look for control characters in it"
    done
done

say "learning and applying joint BPE, $merges merges"
cat "$out/tok/train.tok.$src" "$out/tok/train.tok.$tgt" | subword-nmt learn-bpe -s "$merges" > "$out/codes" 2> "$out/tok/bpe.log"
for split in train valid test; do
    for lang in "$src" "$tgt"; do
        subword-nmt apply-bpe -c "$out/codes" < "$out/tok/$split.tok.$lang" > "$out/tok/$split.$lang"
    done
done

say "binarising"
run fairseq-preprocess -s "$src" -t "$tgt" --joined-dictionary --workers 2 --destdir "$out/bin" \
    --trainpref "$out/tok/train" --validpref "$out/tok/valid" --testpref "$out/tok/test" > "$out/tok/preprocess.log" 2>&1 ||
    die "fairseq-preprocess failed; the end of $out/tok/preprocess.log: $(tail -n 1 "$out/tok/preprocess.log")"
cp "$raw/test.$src" "$raw/test.$tgt" "$out/"
touch "$out/bin/done"
