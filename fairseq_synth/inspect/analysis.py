"""Inspects one checkpoint, part by part. The results are plain values that can be written to a JSON file."""

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import torch.nn as nn
from torch import Tensor

from .attentions import attentions
from .checkpoints import Loaded, batches, readable
from .histograms import add_histograms
from .inspection import Inspection, Options, Results, round_floats
from .parts import attention as attention_part
from .parts import heads as heads_part
from .parts import layers as layers_part
from .parts import lengths as lengths_part
from .parts import words as words_part
from .passes import loss

logger = logging.getLogger(__name__)


class Part(NamedTuple):
    """The functions of a part of an inspection on data; `arguments.PARTS` describes the parts for --help.

    Attributes:
        describe_cost: returns how much the part computes for one model.
        measure: measures the part, and adds the results to the inspection.
    """

    describe_cost: Callable[[Inspection], str]
    measure: Callable[[Inspection], None]


PARTS = {
    "attention": Part(attention_part.describe_cost, attention_part.measure),
    "layers": Part(layers_part.describe_cost, layers_part.measure),
    "heads": Part(heads_part.describe_cost, heads_part.measure),
    "words": Part(words_part.describe_cost, words_part.measure),
    "lengths": Part(lengths_part.describe_cost, lengths_part.measure),
}


def analyse(loaded: Loaded, options: Options) -> Results:
    """Inspects a checkpoint and returns all results.

    Args:
        loaded: the checkpoint's model, with or without data.
        options: what to measure.

    Returns:
        ``checkpoint`` (its settings), ``attentions`` {name: heads, functions, and what is measured for each}, and with
        data ``data``, ``loss`` and, for the parts that the options choose, ``sentences``, ``layers``, ``removal``,
        ``words`` and ``lengths``. docs/analysis.md explains them.
    """
    inspection = begin(loaded, options)
    if loaded.data is not None:
        for name in options.parts:
            part = PARTS[name]
            part.measure(inspection)  # adds the results of the part to `inspection.results`
    return inspection.results


def begin(loaded: Loaded, options: Options) -> Inspection:
    """Begins the inspection of a checkpoint, and returns it with the results that every inspection has."""
    if loaded.data is None:
        return begin_without_data(loaded, options)
    return begin_with_data(loaded, options)


def begin_with_data(loaded: Loaded, options: Options) -> Inspection:
    """Begins the inspection of a checkpoint with data.

    The results are the settings of the training, histograms of the parameters, and the loss on the data.
    """
    initial_model = loaded.build_initial_model()
    attention_results = describe_attentions_and_parameters(loaded.model, initial_model)
    sentence_indices = readable(loaded, options.subset, options.sentences)
    data_batches = batches(loaded, options.subset, sentence_indices)
    start = time.perf_counter()
    loss_in_bits = loss(loaded, data_batches)
    pass_seconds = time.perf_counter() - start
    logger.info(f"{loaded.path}: {len(sentence_indices)} sentences of {options.subset}")
    results: Results = {
        "checkpoint": describe_checkpoint(loaded),
        "attentions": attention_results,
        "data": {"subset": options.subset, "sentences": len(sentence_indices)},
        "loss": round_floats(loss_in_bits),
    }
    return Inspection(
        loaded=loaded,
        initial_model=initial_model,
        options=options,
        results=results,
        sentence_indices=sentence_indices,
        batches=data_batches,
        loss=loss_in_bits,
        pass_seconds=pass_seconds,
    )


def begin_without_data(loaded: Loaded, options: Options) -> Inspection:
    """Begins the inspection of a checkpoint without data.

    The results are the settings of the training, histograms of the parameters, and the weights of those attentions
    whose weights do not depend on the input.
    """
    initial_model = loaded.build_initial_model()
    attention_results = describe_attentions_and_parameters(loaded.model, initial_model)
    results_of_weights = attention_part.measure_without_data(loaded.model, options.positions)
    for name, results_of_attention in results_of_weights.items():
        attention_results[name].update(results_of_attention)
    return Inspection(
        loaded=loaded,
        initial_model=initial_model,
        options=options,
        results={"checkpoint": describe_checkpoint(loaded), "attentions": attention_results},
        sentence_indices=[],
        batches=[],
        loss=0.0,
        pass_seconds=0.0,
    )


def describe_attentions_and_parameters(model: nn.Module, initial_model: nn.Module | None) -> dict[str, Results]:
    """Returns {name of an attention: its results}: those of `describe_attentions`, and histograms of its parameters.

    Args:
        model: the trained model.
        initial_model: the model before its training; None if it is not known.
    """
    attention_results = describe_attentions(model)
    trained_parameters = collect_parameters(model)
    initial_parameters = {} if initial_model is None else collect_parameters(initial_model)
    add_histograms(attention_results, "parameters", trained_parameters, initial_parameters)
    return attention_results


def describe_checkpoint(loaded: Loaded) -> Results:
    """Returns the settings of a checkpoint's training."""
    model = loaded.cfg.model
    return {
        "model": getattr(model, "arch", None) or model._name,
        "seed": loaded.cfg.common.seed,
        "updates": loaded.updates,
        "parameters": sum(value.numel() for value in loaded.model.parameters()),
        "max_length": getattr(model, "synth_max_length", None),
    }


def describe_attentions(model: nn.Module) -> dict[str, Results]:
    """Returns {name of an attention: its results}, with the results that depend only on the model.

    These are ``group``, such as ``encoder.self``; ``layer``; ``heads``, their number; ``functions``; and ``alpha``,
    the weights of the functions in a mixture.
    """
    results: dict[str, Results] = {}
    for attention in attentions(model):
        results[attention.name] = {
            "group": attention.group,
            "layer": attention.layer,
            "heads": attention.num_heads,
            "functions": attention.functions,
            "alpha": round_floats(attention.alpha()),
        }
    return results


def collect_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Returns {name of an attention: the trained values that its logits are computed from}."""
    return {attention.name: attention.logit_parameters() for attention in attentions(model)}
