#!/usr/bin/env bash
# Multi30k, task 1 (image captions; Elliott et al. 2016, 2017) -> OUT_DIR-raw, then data for fairseq-train in OUT_DIR.
#
#   scripts/prepare_multi30k.sh de|fr OUT_DIR [--from DIR] [options of prepare.sh]
#
# The raw text comes from --from, a folder with {train,val,test_2016_flickr}.{en,de,fr}.gz, or without it from the
# corpus' own repository. Its content is checked by SHA-256 either way. The test set is test_2016_flickr.
set -euo pipefail
source "$(dirname "$0")/common.sh"

from=''
after_words "from" "$@"
tgt=${words[0]} out=${words[1]}
[ "$tgt" = de ] || [ "$tgt" = fr ] || die "$tgt: Multi30k is translated from English into de or fr here; see $0 --help"
[ -z "$from" ] || [ -d "$from" ] || die "--from $from: no such folder; leave it out to download the corpus"
url=https://raw.githubusercontent.com/multi30k/dataset/a3d2e0d26b56f3846f66a952536ffed4e401d05a/data/task1/raw

# SHA-256 of the text, not of the .gz, which depends on who compressed it
sums="
4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16  test_2016_flickr.de
399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182  test_2016_flickr.en
cb3160d69b002bb638e66cc7612fcd56cb0af82eadc9c142dedc438afb885ef6  test_2016_flickr.fr
2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72  train.de
460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6  train.en
5925a3c18f1587b6b54b87743106e6e8ab93618edb6f65d19eac0621f853a10d  train.fr
660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660  val.de
1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227  val.en
5304e444d842e962b2dda4d816b70b22a1765b15401642b7ca37a67477e708dc  val.fr
"
raw=$out-raw packed=$from
prepare=("$root/scripts/prepare.sh" "$raw" en "$tgt" "$out" "${rest[@]}")
(DRY_RUN=1 "${prepare[@]}" > /dev/null) # are its options right?
alone "$raw"
[ ! -f "$out/bin/done" ] || exec "${prepare[@]}"
[ -n "$from" ] || packed=$raw/archives # a folder of its own: what lies beside train is trained on
[ -n "${DRY_RUN:-}" ] || mkdir -p "$packed"
for part in train val test_2016_flickr; do
    case $part in val) split=valid ;; test_2016_flickr) split="test" ;; train) split="train" ;; esac
    for lang in en "$tgt"; do
        file=$raw/$split.$lang gz=$packed/$part.$lang.gz
        wanted=$(awk -v name="$part.$lang" '$2 == name { print $1 }' <<< "$sums")
        [ -f "$file" ] && [ "$(sha256sum < "$file" | cut -d ' ' -f 1)" = "$wanted" ] && continue
        [ -n "$from" ] || [ -f "$gz" ] ||
            download "$url/$part.$lang.gz" "$gz" "get the corpus elsewhere and name its folder by --from"
        if [ -z "${DRY_RUN:-}" ] && [ "$(gunzip -c "$gz" 2> /dev/null | sha256sum | cut -d ' ' -f 1)" != "$wanted" ]; then
            [ -n "$from" ] || rm -f "$gz"
            die "$gz: missing, cut off, or not Multi30k's text of the commit this recipe is for (by its SHA-256)"
        fi
        [ -n "${DRY_RUN:-}" ] || rm -f "$file"
        produce "$file" "gunzip -c $(q "$gz")"
    done
done
exec "${prepare[@]}"
