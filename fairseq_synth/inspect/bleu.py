"""Measures BLEU of a translation model on the data that it is inspected with."""

from typing import NamedTuple

import torch
from fairseq.dataclass.configs import GenerationConfig
from fairseq.utils import strip_pad

from .attentions import find_stacks
from .checkpoints import Batch, Loaded


class Bleu(NamedTuple):
    """A score, and how sacreBLEU computed it."""

    score: float
    signature: str


def can_translate(loaded: Loaded) -> bool:
    """Returns whether the model translates, so that BLEU can be measured."""
    has_both_stacks = set(find_stacks(loaded.model)) == {"encoder", "decoder"}
    return has_both_stacks and hasattr(loaded.task, "inference_step")


@torch.no_grad()
def compute_bleu(loaded: Loaded, sample: list[Batch], beam: int, remove_bpe: str | None) -> Bleu:
    """Translates the data and returns sacreBLEU, on the data's own tokens after its subwords are joined.

    Args:
        loaded: the model, with data.
        sample: the sentences in batches, with their references.
        beam: size of the beam.
        remove_bpe: fairseq's name for the kind of subwords, such as ``subword_nmt``.
    """
    from sacrebleu.metrics import BLEU

    task = loaded.task
    dictionary = task.target_dictionary
    generator = task.build_generator([loaded.model], GenerationConfig(beam=beam))
    ignored_symbols = getattr(generator, "symbols_to_strip_from_output", {generator.eos})
    translations = []
    references = []
    for batch in sample:
        batch_hypotheses = task.inference_step(generator, [loaded.model], batch)
        for hypotheses, target in zip(batch_hypotheses, batch["target"]):
            tokens = hypotheses[0]["tokens"].int()
            translation = ""
            if len(tokens):  # fairseq's dictionary takes no empty tensor
                translation = dictionary.string(tokens, remove_bpe, extra_symbols_to_ignore=ignored_symbols)
            reference = dictionary.string(
                strip_pad(target, dictionary.pad()),
                remove_bpe,
                escape_unk=True,
                extra_symbols_to_ignore=ignored_symbols,
            )
            translations.append(translation)
            references.append(reference)
    metric = BLEU(tokenize="none", force=True)
    score = metric.corpus_score(translations, [references]).score
    return Bleu(float(score), f"BLEU|{metric.get_signature()}")
