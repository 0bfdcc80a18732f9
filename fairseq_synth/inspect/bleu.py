"""Measures BLEU of a translation model on the data that it is inspected with."""

from typing import Any, NamedTuple

import torch
from fairseq.dataclass.configs import GenerationConfig
from fairseq.utils import strip_pad
from torch import Tensor

from .attentions import find_stacks
from .checkpoints import Batch, Loaded


class Bleu(NamedTuple):
    """A score of sacreBLEU, and the signature that says how it was computed."""

    score: float
    signature: str


def can_translate(loaded: Loaded) -> bool:
    """Returns whether a model has an encoder and a decoder and its task can translate, so that it has a BLEU score."""
    has_both_stacks = set(find_stacks(loaded.model)) == {"encoder", "decoder"}
    return has_both_stacks and hasattr(loaded.task, "inference_step")


@torch.no_grad()
def compute_bleu(loaded: Loaded, batches: list[Batch], beam: int, remove_bpe: str | None) -> Bleu:
    """Translates sentences and compares the translations with their references by sacreBLEU.

    The subwords of both are joined, and the words are compared as the data has them, without a tokenizer.

    Args:
        loaded: the model, with data.
        batches: the sentences, with their references.
        beam: the size of the beam.
        remove_bpe: fairseq's name for the kind of subwords, such as ``subword_nmt``.
    """
    from sacrebleu.metrics import BLEU

    translations, references = translate(loaded, batches, beam, remove_bpe)
    metric = BLEU(tokenize="none", force=True)  # `force` only prevents a warning that the text looks tokenized
    score = metric.corpus_score(translations, [references]).score
    # The signature that sacreBLEU returns does not name the metric.
    return Bleu(score=float(score), signature=f"BLEU|{metric.get_signature()}")


def translate(loaded: Loaded, batches: list[Batch], beam: int, remove_bpe: str | None) -> tuple[list[str], list[str]]:
    """Returns the translations of sentences, and their references, as texts in the same order.

    Args:
        loaded: the model, with data.
        batches: the sentences, with their references.
        beam: the size of the beam.
        remove_bpe: fairseq's name for the kind of subwords that are joined.
    """
    task = loaded.task
    generator = task.build_generator([loaded.model], GenerationConfig(beam=beam))
    # The symbols that are left out of the text, as in fairseq-generate. Some generators do not name any. Then only the
    # end of the sentence is left out.
    ignored_symbols = getattr(generator, "symbols_to_strip_from_output", {generator.eos})
    writer = TextWriter(task.target_dictionary, remove_bpe, ignored_symbols)
    translations = []
    references = []
    for batch in batches:
        hypotheses_of_sentences = task.inference_step(generator, [loaded.model], batch)
        for hypotheses, reference in zip(hypotheses_of_sentences, batch["target"]):
            best_hypothesis = hypotheses[0]
            translations.append(writer.write_translation(best_hypothesis["tokens"]))
            references.append(writer.write_reference(reference))
    return translations, references


class TextWriter:
    """Turns tokens of the target language into text, as fairseq-generate does."""

    def __init__(self, dictionary: Any, remove_bpe: str | None, ignored_symbols: set[int]) -> None:
        """Makes a writer.

        Args:
            dictionary: fairseq's dictionary of the target language.
            remove_bpe: fairseq's name for the kind of subwords that are joined.
            ignored_symbols: tokens that are left out, such as the end of the sentence.
        """
        self.dictionary = dictionary
        self.remove_bpe = remove_bpe
        self.ignored_symbols = ignored_symbols

    def write_translation(self, tokens: Tensor) -> str:
        """Returns the text of a translation (T,)."""
        if len(tokens) == 0:  # for which fairseq's dictionary would fail
            return ""
        text: str = self.dictionary.string(tokens.int(), self.remove_bpe, extra_symbols_to_ignore=self.ignored_symbols)
        return text

    def write_reference(self, tokens: Tensor) -> str:
        """Returns the text of a reference (T,) without padding. Unknown words differ from those of a translation."""
        text: str = self.dictionary.string(
            strip_pad(tokens, self.dictionary.pad()),
            self.remove_bpe,
            escape_unk=True,
            extra_symbols_to_ignore=self.ignored_symbols,
        )
        return text
