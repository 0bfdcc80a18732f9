#!/usr/bin/env bash
# Raw parallel text -> binarised data for fairseq-train: check, normalise and tokenise (sacremoses), joint subwords
# (subword-nmt or sentencepiece), clean, fairseq-preprocess with a joined dictionary.
#
#   scripts/prepare.sh RAW_DIR SRC TGT OUT_DIR [options]
#
#   RAW_DIR   NAME.SRC and NAME.TGT, or the same with .gz, one sentence a line. NAMEs are valid and test; every
#             other is a training corpus, taken in the order of the names.
#   OUT_DIR   receives bin/ for fairseq-train, codes (BPE) or pieces.model (SentencePiece), test.{SRC,TGT} to score
#             against, and settings, which evaluate.sh reads
#
#   --merges N          BPE merges, or the size of the SentencePiece vocabulary (default: 10000)
#   --subwords NAME     bpe (default) or sentencepiece
#   --dash-splits       split words at hyphens when tokenising (Moses' -a)
#   --lowercase         lowercase all text
#   --max-length N      leave out training pairs with more subwords on a side (default: 250)
#   --max-ratio R       leave out training pairs whose lengths in subwords differ more (default: 0, none)
#   --sample N          only the first N pairs of each training corpus, to try a recipe
#   --workers N         processes (default: all cores)
#
# Every step writes its file whole or not at all, so a second call goes on where the first one ended, and a finished
# OUT_DIR is kept. DRY_RUN=1 shows the commands only.
set -euo pipefail
source "$(dirname "$0")/common.sh"

merges=10000 subwords=bpe dash_splits='' lowercase='' max_length=250 max_ratio=0 sample='' workers=$(cores)
options "merges subwords dash-splits! lowercase! max-length max-ratio sample workers" "$@"
[ ${#words[@]} = 4 ] || die "usage: scripts/prepare.sh RAW_DIR SRC TGT OUT_DIR [options]; see $0 --help"
raw=${words[0]} src=${words[1]} tgt=${words[2]} out=${words[3]}
whole 1 merges sample workers
whole 0 max_length
[[ $max_ratio =~ ^[0-9]+(\.[0-9]+)?$ ]] || die "--max-ratio $max_ratio: must be a number"
[ "$src" != "$tgt" ] || die "SRC and TGT are both $src"
[ "$subwords" = bpe ] || [ "$subwords" = sentencepiece ] || die "--subwords $subwords: choose bpe or sentencepiece"
alone "$out"
settings "$out/settings" "$out/text/*" "src=$src" "tgt=$tgt" "subwords=$subwords" "merges=$merges" \
    "dash_splits=$dash_splits" "lowercase=$lowercase" "max_length=$max_length" "max_ratio=$max_ratio" "sample=$sample" \
    "raw=$(realpath -m "$raw")"
if [ -f "$out/bin/done" ]; then
    say "$out is ready, reusing it"
    exit 0
fi
[ -d "$raw" ] || [ -n "${DRY_RUN:-}" ] || die "$raw: no such folder; RAW_DIR holds {train,valid,test}.{$src,$tgt}"
langs=("$src" "$tgt")
[ -n "${DRY_RUN:-}" ] || mkdir -p "$out/text" "$out/tok" "$out/sub"

# clean FLAGS OUT PREFIX...: checked text of both sides
clean() {
    local flags=$1 to=$2
    shift 2
    [ ! -f "$to.$src" ] || [ ! -f "$to.$tgt" ] || return 0
    # shellcheck disable=SC2086
    run python "$root/scripts/clean_pairs.py" "$src" "$tgt" "$to" "$@" $flags || exit 1
}
say "checking the text"
corpora=("$raw/train")
if [ -z "${DRY_RUN:-}" ]; then
    for file in {valid,test}.{"$src","$tgt"}; do
        [ -f "$raw/$file" ] || [ -f "$raw/$file.gz" ] || die "$raw/$file: no such file, nor $file.gz"
    done
fi
if [ -d "$raw" ]; then
    mapfile -t corpora < <(find -L "$raw" -maxdepth 1 \( -name "*.$src" -o -name "*.$src.gz" \) ! -name 'valid.*' ! -name 'test.*' |
        sed "s/\.gz$//; s/\.$src$//" | LC_ALL=C sort -u)
    [ ${#corpora[@]} -gt 0 ] || [ -n "${DRY_RUN:-}" ] || die "$raw/train.$src: no such file, nor any other training corpus"
    for corpus in "${corpora[@]}"; do
        [[ ! ${corpus##*/} =~ ^(dev|valid|test|newstest) ]] ||
            die "$corpus.$src: would be trained on, and is a test set by its name; call it valid or test, or remove it"
    done
fi
clean "${sample:+--sample $sample }${lowercase:+--lowercase}" "$out/text/train" "${corpora[@]}"
clean "${lowercase:+--lowercase}" "$out/text/valid" "$raw/valid"
clean "${lowercase:+--lowercase} --keep-all" "$out/text/test" "$raw/test"

from=$out/text
if [ "$subwords" = bpe ]; then
    say "normalising and tokenising"
    for split in train valid test; do
        for lang in "${langs[@]}"; do
            produce "$out/tok/$split.$lang" "sacremoses --quiet -l $lang -j $workers normalize -c tokenize${dash_splits:+ -a} < $(q "$from/$split.$lang")"
        done
    done
    from=$out/tok
    say "learning and applying joint BPE, $merges merges"
    produce "$out/codes" "cat $(q "$from/train.$src") $(q "$from/train.$tgt") | subword-nmt learn-bpe -s $merges"
    encode() { echo "subword-nmt apply-bpe -c $(q "$out/codes") < $(q "$1")"; }
    # of several processes it splits a file, not a stream
    [ "$workers" -le 1 ] || encode() { echo "subword-nmt apply-bpe -c $(q "$out/codes") --num-workers $workers -i $(q "$1")"; }
else
    say "learning and applying a joint SentencePiece model of $merges pieces"
    produce "$out/pieces.model" "python $(q "$root/scripts/sentence_pieces.py") train $merges $(q "$from/train.$src") $(q "$from/train.$tgt")"
    encode() { echo "python $(q "$root/scripts/sentence_pieces.py") encode $(q "$out/pieces.model") < $(q "$1")"; }
fi
for split in train valid test; do
    for lang in "${langs[@]}"; do
        to=$out/sub/$split.$lang
        [ $split != train ] || to=$out/sub/all.$lang
        produce "$to" "$(encode "$from/$split.$lang")"
        [ -n "${DRY_RUN:-}" ] || [ "$(wc -l < "$to")" = "$(wc -l < "$out/text/$split.$lang")" ] ||
            die "$to: $(wc -l < "$to") lines of $(wc -l < "$out/text/$split.$lang"); remove it and call again"
    done
done
clean "--max-length $max_length --max-ratio $max_ratio" "$out/sub/train" "$out/sub/all"

say "binarising"
log=$out/preprocess.log
[ -z "${DRY_RUN:-}" ] && rm -rf "${out:?}/bin" || log=/dev/null
run fairseq-preprocess -s "$src" -t "$tgt" --joined-dictionary --workers "$workers" --destdir "$out/bin" \
    --trainpref "$out/sub/train" --validpref "$out/sub/valid" --testpref "$out/sub/test" > "$log" 2>&1 ||
    die "fairseq-preprocess failed; the end of $log: $(tail -n 1 "$log")"
[ -z "${DRY_RUN:-}" ] || exit 0
cp "$out/text/test.$src" "$out/text/test.$tgt" "$out/"
touch "$out/bin/done"
say "$out is ready"
# types of the dictionary, then sentences, tokens and unknown ones of each file
sed -En 's/^.*\] (Dictionary: .*)/\1/p' "$log" | uniq
sed -En 's/^.*\] .*\/([^/]*: .* sents, .*)/\1/p' "$log"
