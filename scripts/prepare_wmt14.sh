#!/usr/bin/env bash
# WMT14 English-German or English-French, from the download to data for fairseq-train.
#
#   scripts/prepare_wmt14.sh de|fr OUT_DIR [--from DIR] [--mirror URL] [options of prepare.sh]
#
#   --from DIR     corpora at hand instead of the download: NAME.en and NAME.de, or with .gz; valid and test are
#                  taken from there too if there are any. mtdata's names (train.eng, dev.deu, test1.eng) will do.
#   --mirror URL   of statmt.org's files (default: https://www.statmt.org)
#
# Training: the corpora of WMT14, Europarl v7, Common Crawl, News Commentary v9 and for French UN (undoc.2000) and
# Giga. Validation: newstest2013. Test: newstest2014, sacreBLEU's wmt14/full. De needs about 10 GB of disk, Fr 100.
# Archives are checked by SHA-256 (wmt14.sha256); an interrupted download goes on where it stopped, and so does all
# that follows. DRY_RUN=1 shows the commands only. --sample 2000 tries the whole recipe on little text.
#
# What these defaults do to BLEU, and why they are so:
#   --dash-splits      as in fairseq's own preparation of WMT14: "a-b" becomes three words. It raises tokenised
#                      BLEU, so compare detokenised (sacreBLEU) figures, where it is undone.
#   News Commentary v9 is WMT14's. fairseq's script takes v12 of WMT17 unless told otherwise: 70,000 pairs more.
#   no deduplication   as in fairseq's; other copies of this data set that are deduplicated are smaller.
#   newstest2013       as validation, so that no training pair is held out. fairseq's script takes each 100th
#                      (En-Fr 1333rd) training pair, which is easier text.
#   wmt14/full         3,003 sentences; sacreBLEU's wmt14 without "full" has 2,737, another figure.
#   punctuation        is normalised in training and test sources, so translations have plain quotation marks where
#                      the German reference has its own: sacreBLEU counts them as errors.
#   --merges 40000     joint BPE, --max-length 250, --max-ratio 1.5: as in fairseq's. The vocabulary decides the
#                      model's size; the paper's 37k of another preparation cannot be had any more.
set -euo pipefail
source "$(dirname "$0")/common.sh"

from='' mirror=https://www.statmt.org
after_words "from mirror" "$@"
tgt=${words[0]} out=${words[1]}
[ "$tgt" = de ] || [ "$tgt" = fr ] || die "$tgt: the paper translates English into de or fr; see $0 --help"
[ -z "$from" ] || [ -d "$from" ] || die "--from $from: no such folder; leave it out to download the corpora"
archives=$out/archives raw=$out/raw
prepare=("$root/scripts/prepare.sh" "$raw" en "$tgt" "$out" --merges 40000 --dash-splits --max-ratio 1.5 "${rest[@]}")
(DRY_RUN=1 "${prepare[@]}" > /dev/null) # are its options right?
alone "$raw"
if [ ! -f "$out/bin/done" ] || [ -n "$from" ]; then
    settings "$raw/settings" "$raw/*.en*" "from=${from:+$(realpath "$from")}"
fi
[ ! -f "$out/bin/done" ] || exec "${prepare[@]}"
[ -n "${DRY_RUN:-}" ] || mkdir -p "$archives"
export SACREBLEU=$archives/sacrebleu

# fetch PATH: mirror's file among the archives, checked, or not there
fetch() {
    local url=$mirror/$1 file=$archives/${1##*/} wanted found
    [ ! -f "$file.checked" ] || return 0
    wanted=$(awk -v path="$1" '$2 == path { print $1 }' "$root/scripts/wmt14.sha256")
    [ -f "$file" ] || download "$url" "$file" "name another --mirror, or corpora at hand by --from"
    printf '+ sha256sum %q # %s\n' "$file" "$wanted"
    [ -z "${DRY_RUN:-}" ] || return 0
    found=$(sha256sum < "$file" | cut -d ' ' -f 1)
    if [ "$found" != "$wanted" ]; then
        rm -f "$file"
        die "$url: its SHA-256 is $found, not $wanted: not the file of WMT14, or altered on the way; it was removed. Call again, or name another --mirror"
    fi
    touch "$file.checked"
}
# corpus NAME PATH MEMBER [.gz]: both sides of a corpus, out of an archive
corpus() {
    local lang
    [ ! -f "$raw/$1.en$4" ] || [ ! -f "$raw/$1.$tgt$4" ] || return 0
    fetch "$2"
    for lang in en "$tgt"; do
        produce "$raw/$1.$lang$4" "tar -xOf $(q "$archives/${2##*/}")$3.$lang$4"
    done
}
# at_hand NAME: whether --from has this test set
at_hand() { [ -n "$from" ] && [ -n "$(find "$raw" -name "$1.*" -type l)" ]; }
# testset NAME SET: a test set of sacreBLEU's as NAME
testset() {
    local lang
    for lang in en "$tgt"; do
        # it takes an archive that it has for good, even one of a download that failed
        [ -n "${DRY_RUN:-}" ] || compgen -G "$SACREBLEU/$2/*.en-$tgt.*" > /dev/null || rm -rf "${SACREBLEU:?}/$2"
        produce "$raw/$1.$lang" "sacrebleu -t $2 -l en-$tgt --echo $([ "$lang" = en ] && echo src || echo ref)" \
            "call again, or put it as $1.{en,$tgt} into the folder of --from"
    done
}

say "the corpora"
if [ -n "$from" ]; then
    declare -A extensions=([en]=en [eng]=en [de]=de [deu]=de [fr]=fr [fra]=fr) names=([dev]=valid [test1]=test)
    for file in "$from"/*; do
        name=${file##*/} gz=''
        [[ $name != *.gz ]] || { gz=.gz name=${name%.gz}; }
        lang=${extensions[${name##*.}]:-} name=${name%.*}
        [ "$lang" != en ] && [ "$lang" != "$tgt" ] && continue
        run ln -sfn "$(realpath "$file")" "$raw/${names[$name]:-$name}.$lang$gz"
    done
else
    corpus 1-europarl-v7 wmt13/training-parallel-europarl-v7.tgz "training/europarl-v7.$tgt-en" ''
    corpus 2-commoncrawl wmt13/training-parallel-commoncrawl.tgz "commoncrawl.$tgt-en" ''
    corpus 3-news-commentary-v9 wmt14/training-parallel-nc-v9.tgz "training/news-commentary-v9.$tgt-en" ''
    if [ "$tgt" = fr ]; then
        corpus 4-undoc wmt13/training-parallel-un.tgz un/undoc.2000.fr-en ''
        corpus 5-giga wmt10/training-giga-fren.tar giga-fren.release2.fixed .gz
    fi
fi
at_hand valid || testset valid wmt13
if ! at_hand "test"; then
    testset "test" wmt14/full
    # tells evaluate.sh to score by name, against the references as published
    [ -n "${DRY_RUN:-}" ] || echo wmt14/full > "$out/sacrebleu_set"
fi
exec "${prepare[@]}"
