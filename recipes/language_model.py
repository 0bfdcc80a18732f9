"""Language models: the corpora, and perplexity by word on the test set."""

import re
from pathlib import Path
from shlex import quote
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from . import corpora
from .command import ROOT, Parser, UserError, cores, dry_run, existing_folder, integer, run, say, shell
from .corpora import checksums, fetch_all, sha256
from .prepare import SPLITS, apply_bpe, begin_text_anew, folder_of_data, preprocess, print_counts
from .scoring import Evaluation, flag, print_scores

PREPARE = """A corpus of language modelling, to binarised data for fairseq-train.

  scripts/prepare.sh ptb|wikitext2|wikitext103|lm1b|lm OUT_DIR [--from DIR] [options]

  ptb          Penn Treebank as prepared by Mikolov: words, 10,000 types
  wikitext2    WikiText-2, words, 33,278 types
  wikitext103  WikiText-103, words, 267,735 types
  lm1b         One Billion Word benchmark, in 32,000 BPE merges; validation is heldout-00001, test heldout-00000
  lm           your text: {train,valid,test}.txt in the folder of --from; words between spaces

The text comes from --from, a folder with the corpus' archive, its own files or {train,valid,test}.txt, any of them
also as .gz; without it, it is downloaded. It is checked by SHA-256 where that is known (lm.sha256). Each line
ends with </s>. A second call goes on where the first one ended. DRY_RUN=1 shows the commands only.
"""
SCORES = """
    Language models: perplexity by word, exp(nats of the test set / (its words + its lines)), each line having an end
    of its own to predict, as in the literature on corpora of words; with subwords, a word's nats are the sum over its
    pieces. Rows are blocks of --tokens-per-sample as in training; --context-window gives each token more context.
    There is no significance test.
"""
RECIPE, TEST = "ptb_cpu", ""
prepare = corpora.prepare_corpus
METRIC, METRIC_NAME, BEST = "ppl", "perplexity", min


class Corpus(NamedTuple):
    """Where a corpus is from, and its files."""

    files: Sequence[str]  # patterns below the folder of the unpacked archives: train, valid, test
    urls: Sequence[str] = ()  # archives, or the files themselves
    merges: Optional[int] = None  # of BPE; None: words


def read_corpora() -> Dict[str, Corpus]:
    """Those of corpora.yaml."""
    found = {name: entry for name, entry in corpora.CORPORA.items() if "files" in entry and "source" not in entry}
    for entry in found.values():
        if isinstance(entry["files"], str):
            entry["files"] = [entry["files"].format(split) for split in SPLITS]
    return {name: Corpus(**entry) for name, entry in found.items()}


CORPORA = read_corpora()


def main(argv: Sequence[str]) -> None:
    """prepare.sh, of these corpora."""
    parser = Parser("prepare", PREPARE)
    add = parser.add_argument
    add("corpus", metavar="CORPUS", choices=CORPORA, help=", ".join(CORPORA))
    add("out", metavar="OUT_DIR", type=Path)
    add("--from", dest="source", type=existing_folder, metavar="DIR", help="the corpus at hand")
    add("--merges", type=integer(1), metavar="N", help="BPE merges (default: words; lm1b 32000)")
    add("--sample", type=integer(1), metavar="N", help="only the first N training lines, for a trial")
    add("--workers", type=integer(1), default=cores(), metavar="N", help="processes (default: all cores)")
    args = parser.parse_args(argv)
    corpus = CORPORA[args.corpus]
    if not corpus.urls and not args.source:
        raise UserError(f"{args.corpus}: nothing to download; name the folder of {{train,valid,test}}.txt by --from")
    merges, out = args.merges or corpus.merges, args.out
    packed = args.source and any((args.source / Path(url).name).exists() for url in corpus.urls if is_archive(url))
    files = find(corpus, args.source) if args.source and not packed else []  # before anything is written
    # of a known corpus the text itself is checked
    name, source = (args.corpus, "") if corpus.urls else ("own", args.source.resolve())
    settings = {"task": "language_modeling", "corpus": name, "merges": merges or "words"}
    pinned = [path for paths in files for path in paths] if not corpus.urls else []
    with folder_of_data(out, {**settings, "sample": args.sample or "", "from": source}, pinned) as begun:
        if not begun:
            return
        say("the text")
        try:
            take(args.corpus, files or unpacked(corpus, out / "archives", args.source), out / "text", args.sample)
        except UserError:
            begin_text_anew(out)
            raise
        binarise(out, merges, args.workers)


def find(corpus: Corpus, folder: Path) -> List[List[Path]]:
    """The files of each split in a folder, by the corpus' own names or as SPLIT.txt; all also as .gz."""
    found = []
    for split, pattern in zip(SPLITS, corpus.files):
        candidates = [f"{name}{packed}" for name in (pattern, f"{split}.txt") for packed in ("", ".gz")]
        files = next(filter(None, (sorted(folder.glob(name)) for name in candidates)), [])
        if not files:
            names = " or ".join(dict.fromkeys(Path(name).name for name in candidates))
            raise UserError(f"{folder}: no {split} text; it should be named {names}")
        found.append(files)
    return found


def is_archive(url: str) -> bool:
    """Whether it is unpacked, and not a text itself."""
    return url.endswith((".zip", ".tar.gz"))


def unpacked(corpus: Corpus, archives: Path, source: Optional[Path]) -> List[List[Path]]:
    """Unpacks a corpus in `archives`; the files of each split. A dry run gives their patterns.

    Args:
        source: folder of its archive; None downloads it.
    """
    fetch_all(corpus.urls, "lm", archives, source)
    return [[archives / pattern] for pattern in corpus.files] if dry_run() else find(corpus, archives)


def take(corpus: str, files: Sequence[Sequence[Path]], text: Path, sample: Optional[int]) -> None:
    """Makes text/{train,valid,test}.txt of the files of each split, once they are known to be the corpus' own."""
    wanted = checksums("lm")
    for split, paths in zip(SPLITS, files):
        output, names = text / f"{split}.txt", " ".join(quote(str(path)) for path in paths)
        # what is not compressed passes through; a byte-order mark is no part of the first word
        shorter = f" | sed -n 1,{sample}p" if sample and split == "train" else ""
        shell(f"gzip -cdf {names} | sed '1s/^\\xef\\xbb\\xbf//'{shorter}", output)
        if dry_run():
            continue
        digest = "" if sample and split == "train" else wanted.get(f"{corpus}.{split}.txt", "")
        problem = "is not the text of this corpus (by its SHA-256)" if digest and sha256(output) != digest else ""
        try:
            with open(output, encoding="utf-8") as lines:
                problem = problem or ("" if any(line.strip() for line in lines) else "has no text")
        except UnicodeDecodeError as error:
            problem = f"is not UTF-8 ({error.reason}); convert it, e.g. with iconv"
        if problem:
            output.unlink()
            raise UserError(f"{paths[0]}: {problem}")


def binarise(out: Path, merges: Optional[int], workers: int) -> None:
    """The text in words, or in subwords, as fairseq-train reads it."""
    text = out / "text"
    if merges:
        say(f"learning and applying BPE, {merges} merges")
        shell(f"subword-nmt learn-bpe -s {merges} < {quote(f'{text}/train.txt')}", out / "codes")
        encode = apply_bpe(out / "codes", workers)
        for split in SPLITS:
            shell(f"{encode} {quote(f'{text}/{split}.txt')}", out / "sub" / f"{split}.txt")
        text = out / "sub"
    say("binarising")
    flags = ["--only-source", "--workers", workers]
    preprocess(flags, out / "bin", f"{text}/{{}}.txt", out / "preprocess.log")
    if not dry_run():
        print_counts(out / "preprocess.log")


def score(run_of: Evaluation, context_window: Optional[int] = None, max_tokens: int = 4096) -> Dict[str, Any]:
    """The perplexity of the test set; nothing in a dry run."""
    data, recipe, training = run_of.data, run_of.recipe, run_of.training
    context = recipe.context_window if context_window is None else context_window
    block = int(flag(training, recipe, "tokens-per-sample") or 1024)
    if context >= block:
        raise UserError(f"--context-window {context}: must be less than --tokens-per-sample, here {block}")
    say("scoring the test set")
    argv = ["fairseq-eval-lm", data / "bin", "--user-dir", ROOT / "fairseq_synth", "--path", run_of.checkpoint]
    argv += ["--gen-subset", "test", "--sample-break-mode", flag(training, recipe, "sample-break-mode") or "none"]
    argv += ["--tokens-per-sample", block, "--context-window", context, "--max-tokens", max(max_tokens, block)]
    run([*argv, "--no-progress-bar"], log=run_of.out / "eval_lm.log")
    if dry_run():
        return {}
    scores = perplexity(data, (run_of.out / "eval_lm.log").read_text())
    scores["ppl"]["signature"] += f"|block:{block}|context:{context}"
    return scores


def report(data: Path, run_dir: Path) -> None:
    """Prints the scores of an evaluated run."""
    print_scores(run_dir, TEST)


def perplexity(data: Path, log: str) -> Dict[str, Any]:
    """The perplexity by word and by token, of what fairseq-eval-lm says of the test set."""
    counted = re.search(r"Evaluated ([\d,]+) tokens", log)
    result = re.search(r"Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+)", log)
    if not counted or not result:
        raise UserError(f"fairseq-eval-lm printed no perplexity; see the evaluation of {data}")
    tokens, bits, by_token = int(counted[1].replace(",", "")), float(result[1]), float(result[2])
    words = word_count(data / "text" / "test.txt")
    wanted = words
    if (data / "sub").exists():
        wanted = word_count(data / "sub" / "test.txt")
    if tokens != wanted:
        raise UserError(
            f"fairseq-eval-lm scored {tokens} of {wanted} tokens of {data}: the others are in lines longer than "
            "--tokens-per-sample; train with a larger one, or with --sample-break-mode none"
        )
    by_word = by_token if words == tokens else round(2 ** (bits * tokens / words), 2)
    counts = f"words+lines:{words}|tokens:{tokens}"
    return {
        "ppl": {"score": by_word, "name": "PPL by word", "signature": counts},
        "token_ppl": {"score": by_token, "name": "PPL by token", "signature": counts},
    }


def word_count(path: Path) -> int:
    """The words of a text and its line ends, as fairseq counts them."""
    with open(path, encoding="utf-8") as lines:
        return sum(len(line.split()) + 1 for line in lines)
