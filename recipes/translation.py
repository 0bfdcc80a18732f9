"""Translation: the test set translated and scored by sacreBLEU; a paired bootstrap test."""

import json
import re
from pathlib import Path
from typing import Any, ClassVar, Dict, List, Mapping, Optional, Sequence, Tuple

from .command import ROOT, UserError, dry_run, read_settings, write
from .hyperparameters import Recipe
from .scoring import Scores, Task, read_lines


class Translation(Task):
    """
    Translation: BLEU and chrF of detokenised text by sacreBLEU, the figures to compare; tokenised BLEU, as
    fairseq-generate would count it (BPE only); compound-split BLEU (En-De only), with plain quotation marks, as the
    literature on WMT14 reports since Vaswani et al., higher than sacreBLEU's. --baseline: sacreBLEU's paired bootstrap,
    whose p is nearly one-sided: for models that are equal it is below 0.05 in some 11 % of cases. Also test.hyp.TGT,
    the translations.
    """

    RECIPE, TEST = "wmt_en_de", "Paired bootstrap"
    METRIC, METRIC_NAME = "bleu", "BLEU"
    OPTIONS: ClassVar[Sequence[str]] = ("baseline", "test", "beam", "lenpen")
    LABELS = {"chrf": "chrF", "tokenised": "tokenised BLEU", "compound_split": "compound-split BLEU"}
    LOG = "generate.log"

    @classmethod
    def files(cls, data: Path, run_dir: Path) -> Sequence[Path]:
        src, tgt = (read_settings(data / "settings")[side] for side in ("src", "tgt"))
        return data / f"test.{src}", run_dir / f"test.hyp.{tgt}", data / f"test.{tgt}"

    def command(self) -> List[object]:
        flags = generation_flags(self.data, self.settings, self.checkpoint, self.recipe, self.max_tokens)
        return ["fairseq-generate", *flags]

    def score(self) -> Scores:
        if not dry_run():
            bleu(self.settings)  # what it lacks is told before anything is translated
        try:
            return super().score()
        except UserError:
            log = self.out / self.LOG
            said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
            found = too_long(said)
            if not found:
                raise
            src, _, tgt = self.files(self.data, self.out)
            where = f"{src}: line {found[0]}, here or in {tgt.name}, is longer than the model's {found[1]} tokens"
            longer = ", or train with a larger -- --synth-max-length" if "--synth-max-length" in said else ""
            raise UserError(f"{where}; split it{longer}") from None

    def figures(self, log: str) -> Scores:
        """Those of `scores`, of the translations, which are written too."""
        _, output, reference = self.files(self.data, self.out)
        wanted = read_lines(reference)
        written = hypotheses(log, "D", len(wanted), f"fairseq-generate (see {self.out / self.LOG})")
        write(output, "".join(f"{line}\n" for line in written))
        return self.scores(written, wanted, log)

    def scores(self, written: List[str], wanted: List[str], log: str) -> Scores:
        from sacrebleu.metrics import BLEU, CHRF
        from sacremoses import MosesTokenizer

        src, tgt = self.settings["src"], self.settings["tgt"]
        scores = {"bleu": count(bleu(self.settings), written, wanted)}
        scores["chrf"] = count(CHRF(lowercase=bool(self.settings["lowercase"])), written, wanted)
        test_set = self.data / "sacrebleu_set"  # sacreBLEU's name, which its signature does not say
        if test_set.exists():
            scores["bleu"]["test_set"] = scores["chrf"]["test_set"] = test_set.read_text().strip()
        tokenised = BLEU(tokenize="none", force=True)
        if self.settings["subwords"] == "bpe":
            subwords = hypotheses(log, "H", len(wanted), "fairseq-generate")
            words = [re.sub("(@@ )|(@@ ?$)", "", line) for line in subwords]
            scores["tokenised"] = count(tokenised, words, read_lines(self.data / "tok" / f"test.{tgt}"))
        if (src, tgt) == ("en", "de"):
            split = MosesTokenizer("de").tokenize
            # models write plain quotation marks, as training text is normalised, and the reference has German ones
            plain = ([re.sub("[„“”]", '"', line) for line in side] for side in (written, wanted))
            sides = ([split_compounds(split(line, return_str=True)) for line in side] for side in plain)
            scores["compound_split"] = count(tokenised, *sides)
        return scores

    @classmethod
    def test(cls, data: Path, wanted: List[str], before: List[str], after: List[str]) -> Dict[str, Any]:
        from sacrebleu.significance import PairedTest

        metrics = {"BLEU": bleu(read_settings(data / "settings"))}
        test = PairedTest([("baseline", before), ("this run", after)], metrics, [wanted], test_type="bs")
        signatures, results = test()
        scores: Any = results["BLEU"]
        # of equal translations sacreBLEU counts no resample, which would make the difference of 0 a significant one
        p_value = 1.0 if before == after else scores[1].p_value
        return {
            "metric": "BLEU",
            "baseline": round(scores[0].score, 2),
            "score": round(scores[1].score, 2),
            "p_value": p_value,
            "signature": f"BLEU|{signatures['BLEU'].format()}",
        }


def bleu(settings: Mapping[str, str]) -> Any:
    """sacreBLEU's BLEU of detokenised text."""
    from sacrebleu.metrics import BLEU

    try:
        return BLEU(lowercase=bool(settings["lowercase"]), trg_lang=settings["tgt"])
    except RuntimeError as error:  # a language that needs another library
        raise UserError(f"sacrebleu failed: {' '.join(str(error).split())}") from None


def count(metric: Any, written: Sequence[str], wanted: Sequence[str]) -> Dict[str, Any]:
    """A figure as sacreBLEU's command line gives it."""
    score = metric.corpus_score(written, [wanted])
    found: Dict[str, Any] = json.loads(score.format(signature=metric.get_signature().format(), is_json=True))
    return found


def hypotheses(generated: str, mark: str, wanted: int, program: str) -> List[str]:
    """A program's translations in the order of the corpus: its lines ``D-7<tab>score<tab>text``.

    `mark`: D for detokenised text, H for subwords.
    """
    found = re.findall(rf"^{mark}-(\d+)\t[^\t\n]*\t(.*)$", generated, re.M)
    if len(found) != wanted:
        raise UserError(f"{program} has left {wanted - len(found)} of {wanted} sentences out")
    return [text for _, text in sorted(found, key=lambda line: int(line[0]))]


def too_long(errors: str) -> Optional[Tuple[int, int]]:
    """(line of the text, tokens that the model takes), where fairseq has refused a sentence for its length."""
    found = re.search(r"Size of sample #(\d+) is invalid .*max_positions=\((\d+)", errors)
    return (int(found[1]) + 1, int(found[2])) if found else None


def split_compounds(text: str) -> str:
    """Hyphens between letters as words of their own, as in get_ende_bleu.sh of tensor2tensor."""
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", text)


def generation_flags(
    data: Path, settings: Mapping[str, str], path: Path, recipe: Recipe, max_tokens: int = 4096
) -> List[object]:
    """What fairseq-generate and fairseq-interactive are called with, for a checkpoint and data with these settings."""
    flags: List[object] = [data / "bin", "--user-dir", ROOT / "fairseq_synth", "--path", path]
    flags += ["--source-lang", settings["src"], "--target-lang", settings["tgt"]]
    flags += ["--beam", recipe.beam, "--lenpen", f"{recipe.lenpen:g}", "--max-tokens", max_tokens]
    flags += [word for name, value in recipe.generation.items() for word in (f"--{name}", value)]
    if settings["subwords"] == "sentencepiece":
        return [*flags, "--bpe", "sentencepiece", "--sentencepiece-model", data / "pieces.model"]
    return [*flags, "--bpe", "subword_nmt", "--bpe-codes", data / "codes", "--tokenizer", "moses"]
