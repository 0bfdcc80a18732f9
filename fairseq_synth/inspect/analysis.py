"""Inspects one checkpoint, part by part; the figures are plain values that JSON takes."""

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import torch.nn as nn
from torch import Tensor

from .attentions import attentions
from .checkpoints import Loaded, batches, readable
from .histograms import add_histograms
from .parts import attention as attention_part
from .parts import heads as heads_part
from .parts import layers as layers_part
from .parts import lengths as lengths_part
from .parts import words as words_part
from .passes import loss
from .subject import Figures, Options, Subject, rounded

logger = logging.getLogger(__name__)


class Part(NamedTuple):
    """One part of an inspection on data, which ``--only`` may choose.

    Attributes:
        content: what the part measures, for --help.
        cost_in_general: what that costs for any model, for --help.
        cost: returns what it costs for one model.
        measure: measures it, and adds the figures to those of the subject.
    """

    content: str
    cost_in_general: str
    cost: Callable[[Subject], str]
    measure: Callable[[Subject], None]


PARTS = {
    "attention": Part(
        "logits, attention weights and their singular values",
        "3 passes over the sentences",
        attention_part.cost,
        attention_part.measure,
    ),
    "layers": Part(
        "rank of the layers",
        "8 passes over 64 sentences",
        layers_part.cost,
        layers_part.measure,
    ),
    "heads": Part(
        "importance of heads, loss and BLEU without them",
        "a pass for each head, and up to --steps translations for each kind of attention; the slowest part",
        heads_part.cost,
        heads_part.measure,
    ),
    "words": Part(
        "loss with heads that look by position alone",
        "a pass over up to 2,000 sentences of the training split, then two passes for each head of self-attention",
        words_part.cost,
        words_part.measure,
    ),
    "lengths": Part(
        "loss and BLEU by sentence length",
        "one pass, and one translation",
        lengths_part.cost,
        lengths_part.measure,
    ),
}


def analyse(loaded: Loaded, options: Options) -> Figures:
    """Returns all figures of a checkpoint.

    Args:
        loaded: the checkpoint's model, with or without data.
        options: what the command line may change.

    Returns:
        ``checkpoint`` (its settings), ``attentions`` {name: heads, functions, and what is measured for each}, and with
        data ``data``, ``loss`` and, as the options say, ``sentences``, ``layers``, ``removal``, ``words`` and
        ``lengths``. docs/analysis.md explains them.
    """
    subject = begin(loaded, options)
    if loaded.data is not None:
        for name in options.parts:
            PARTS[name].measure(subject)
    return subject.figures


def begin(loaded: Loaded, options: Options) -> Subject:
    """Begins an inspection, and returns its subject with the figures that every inspection has.

    These are settings, parameters and, with data, the loss on them; without data, the patterns of functions that do not
    look at the input.
    """
    initial = loaded.initial()
    figures: Figures = {"checkpoint": describe_checkpoint(loaded), "attentions": {}}
    for attention in attentions(loaded.model):
        figures["attentions"][attention.name] = {
            "group": attention.group,
            "layer": attention.layer,
            "heads": attention.num_heads,
            "functions": attention.functions,
            "alpha": rounded(attention.alpha()),
        }
    trained_values = collect_parameters(loaded.model)
    initial_values = {} if initial is None else collect_parameters(initial)
    add_histograms(figures["attentions"], "parameters", trained_values, initial_values)
    if loaded.data is None:
        attention_part.measure_without_data(figures["attentions"], loaded.model, options.positions)
        return Subject(
            loaded=loaded,
            initial=initial,
            options=options,
            figures=figures,
            order=[],
            sample=[],
            loss=0.0,
            pass_seconds=0.0,
        )
    order = readable(loaded, options.subset, options.sentences)
    sample = batches(loaded, options.subset, order)
    start = time.perf_counter()
    loss_in_bits = loss(loaded, sample)
    pass_seconds = time.perf_counter() - start
    figures["data"] = {"subset": options.subset, "sentences": len(order)}
    figures["loss"] = rounded(loss_in_bits)
    logger.info(f"{loaded.path}: {len(order)} sentences of {options.subset}")
    return Subject(
        loaded=loaded,
        initial=initial,
        options=options,
        figures=figures,
        order=order,
        sample=sample,
        loss=loss_in_bits,
        pass_seconds=pass_seconds,
    )


def describe_checkpoint(loaded: Loaded) -> Figures:
    """Returns the settings of a checkpoint's training."""
    model = loaded.cfg.model
    return {
        "model": getattr(model, "arch", None) or model._name,
        "seed": loaded.cfg.common.seed,
        "updates": loaded.updates,
        "parameters": sum(value.numel() for value in loaded.model.parameters()),
        "max_length": getattr(model, "synth_max_length", None),
    }


def collect_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Returns {attention: the values that its logits are computed from}."""
    return {attention.name: attention.logit_parameters() for attention in attentions(model)}
