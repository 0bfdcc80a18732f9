"""Translation: the last checkpoints averaged, the test set translated and scored; a paired bootstrap test."""

import json
import os
import re
import subprocess
from pathlib import Path
from shlex import quote
from typing import Any, Dict, List, Optional, Sequence

from .command import ROOT, UserError, dry_run, run, say, shell, show
from .hyperparameters import Recipe
from .prepare import count_lines
from .scoring import Evaluation, print_scores, read_data_settings

SCORES = """
    Translation: BLEU and chrF of detokenised text by sacreBLEU with the signature, the figures to compare; tokenised
    BLEU, as fairseq-generate would count it (BPE only); compound-split BLEU (En-De only), tokenised with hyphens
    split, as the literature on WMT14 En-De reports since Vaswani et al., higher than sacreBLEU's for the same output.
    --baseline: paired bootstrap. Also test.hyp.TGT, the translations, detokenised.
"""
RECIPE = "wmt_en_de"  # of a run that names none
TEST = "Paired bootstrap"  # what `compare` does
METRIC, METRIC_NAME, BEST = "bleu", "BLEU", max
LABELS = {"bleu": "BLEU", "chrf": "chrF", "tokenised": "tokenised BLEU", "compound_split": "compound-split BLEU"}


def hypotheses(generated: str, mark: str) -> List[str]:
    """The translations in the output of fairseq-generate, in the order of the corpus.

    Args:
        mark: ``D`` for detokenised lines (``D-7<tab>score<tab>text``), ``H`` for those in subwords.
    """
    found = re.findall(rf"^{mark}-(\d+)\t[^\t\n]*\t(.*)$", generated, re.M)
    return [text for _, text in sorted(found, key=lambda line: int(line[0]))]


def split_compounds(text: str) -> str:
    """Hyphens between letters as words of their own, as in get_ende_bleu.sh of tensor2tensor."""
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", text)


def sacrebleu(argv: Sequence[object]) -> Any:
    """What sacreBLEU's command line prints as JSON."""
    argv = ["sacrebleu", *argv, "-f", "json"]
    show(argv)
    done = subprocess.run(list(map(str, argv)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    if done.returncode:
        raise UserError(f"sacrebleu failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    return json.loads(done.stdout)


def reference(data: Path) -> List[object]:
    """sacreBLEU's arguments for the test set: by its name where it is one of sacreBLEU's."""
    settings = read_data_settings(data)
    pair = ["-l", f"{settings['src']}-{settings['tgt']}"]
    if test_set(data):
        os.environ["SACREBLEU"] = str(data / "archives" / "sacrebleu")  # where prepare.sh wmt14 has it
        return ["-t", test_set(data), *pair]
    return [data / f"test.{settings['tgt']}", *pair]


def test_set(data: Path) -> str:
    """sacreBLEU's name of the test set, which its signature does not say; empty for another test set."""
    file = data / "sacrebleu_set"
    return file.read_text().strip() if file.exists() else ""


def compare(data: Path, run_dir: Path, baseline: Path) -> Dict[str, Any]:
    """The paired bootstrap test of a run's BLEU against a baseline's, both evaluated on the same data."""
    settings = read_data_settings(data)
    tgt = settings["tgt"]
    name, file = f"test.hyp.{tgt}", data / f"test.{tgt}"
    for folder, what in ((baseline, f"--baseline {baseline}"), (run_dir, str(run_dir))):
        if not (folder / name).exists() or count_lines(folder / name) != count_lines(file):
            raise UserError(f"{what}: not evaluated yet, or not on these data")
    reference(data)  # sets the folder that sacreBLEU reads on import
    from sacrebleu.metrics import BLEU
    from sacrebleu.significance import PairedTest
    from sacrebleu.utils import get_reference_files

    if test_set(data):
        file = Path(get_reference_files(test_set(data), f"{settings['src']}-{tgt}")[0])
    references, base, ours = (read_lines(path) for path in (file, baseline / name, run_dir / name))
    metrics = {"BLEU": BLEU(lowercase=bool(settings["lowercase"]), trg_lang=tgt)}
    test = PairedTest([("baseline", base), ("this run", ours)], metrics, [references], test_type="bs")
    signatures, results = test()
    scores: Any = results["BLEU"]
    before, after = scores
    return {
        "baseline": round(before.score, 2),
        "score": round(after.score, 2),
        "p_value": after.p_value,
        "signature": f"BLEU|{signatures['BLEU'].format()}",
    }


def read_lines(path: Path) -> List[str]:
    """The lines of a file, ended by line feeds alone."""
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def generation_flags(
    data: Path,
    path: Path,
    recipe: Recipe,
    beam: Optional[int] = None,
    lenpen: Optional[float] = None,
    max_tokens: int = 4096,
) -> List[object]:
    """What fairseq-generate and fairseq-interactive are called with.

    Args:
        path: the checkpoint.
        recipe: has what is not given.
    """
    settings = read_data_settings(data)
    lenpen = recipe.lenpen if lenpen is None else lenpen
    flags = [data / "bin", "--user-dir", ROOT / "fairseq_synth", "--path", path]
    flags += ["--source-lang", settings["src"], "--target-lang", settings["tgt"]]
    flags += ["--beam", beam or recipe.beam, "--lenpen", f"{lenpen:g}", "--max-tokens", max_tokens]
    flags += [word for name, value in recipe.generation.items() for word in (f"--{name}", value)]
    if settings["subwords"] == "sentencepiece":
        return [*flags, "--bpe", "sentencepiece", "--sentencepiece-model", data / "pieces.model"]
    return [*flags, "--bpe", "subword_nmt", "--bpe-codes", data / "codes", "--tokenizer", "moses"]


def report(data: Path, run_dir: Path) -> None:
    """Prints the scores of an evaluated run, and three of its translations."""
    print_scores(run_dir, "paired bootstrap", LABELS)
    say("three translations")
    src, tgt = (read_data_settings(data)[side] for side in ("src", "tgt"))
    texts = [data / f"test.{src}", run_dir / f"test.hyp.{tgt}", data / f"test.{tgt}"]
    for lines in list(zip(*map(read_lines, texts)))[:3]:
        print("source:    {}\noutput:    {}\nreference: {}".format(*lines))


def score(
    run_of: Evaluation, beam: Optional[int] = None, lenpen: Optional[float] = None, max_tokens: int = 4096
) -> Dict[str, Any]:
    """Translates the test set and scores the translations, which are written too; nothing in a dry run."""
    data, settings, out = run_of.data, run_of.settings, run_of.out
    say("translating the test set")
    argv = generation_flags(data, run_of.checkpoint, run_of.recipe, beam, lenpen, max_tokens)
    run(["fairseq-generate", *argv], log=out / "generate.log")
    if dry_run():
        return {}
    say("scoring")
    tgt, lowercase = settings["tgt"], bool(settings["lowercase"])
    generated = (out / "generate.log").read_text(encoding="utf-8")
    hypothesis = out / f"test.hyp.{tgt}"
    lines = hypotheses(generated, "D")
    wanted = count_lines(data / f"test.{tgt}")
    if len(lines) != wanted:
        raise UserError(f"{out}/generate.log: {len(lines)} translations of {wanted} sentences; see its end")
    hypothesis.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    flags = ["-lc", "--chrf-lowercase"] if lowercase else []
    bleu, chrf = sacrebleu([*reference(data), "-i", hypothesis, "-m", "bleu", "chrf", *flags, "-w", 2])
    scores = {"bleu": bleu, "chrf": chrf}
    if test_set(data):
        bleu["test_set"] = chrf["test_set"] = test_set(data)
    tokenised = ["-m", "bleu", "--tokenize", "none", "--force", "-w", 2]
    if settings["subwords"] == "bpe":
        words = [re.sub("(@@ )|(@@ ?$)", "", line) for line in hypotheses(generated, "H")]
        (out / f"test.tok.{tgt}").write_text("".join(f"{line}\n" for line in words), encoding="utf-8")
        scores["tokenised"] = sacrebleu([data / "tok" / f"test.{tgt}", "-i", out / f"test.tok.{tgt}", *tokenised])
    if (settings["src"], tgt) == ("en", "de"):
        for path, file in ((data / f"test.{tgt}", out / "compound.ref"), (hypothesis, out / "compound.hyp")):
            shell(f"sacremoses --quiet -l de tokenize < {quote(str(path))}", file)
            file.write_text(split_compounds(file.read_text(encoding="utf-8")), encoding="utf-8")
        scores["compound_split"] = sacrebleu([out / "compound.ref", "-i", out / "compound.hyp", *tokenised])
    return scores
