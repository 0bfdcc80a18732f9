"""Measures how much each head matters: to the loss alone, and as more and more heads are removed."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attentions import Attention, Head, attentions
from ..bleu import can_translate, compute_bleu
from ..checkpoints import Batch, Loaded
from ..hooks import removed_heads, scaled_heads
from ..inspection import Inspection, Options, Results, round_floats
from ..measure import removal_order, removal_steps
from ..passes import build_criterion, count_targets, loss, progress


class Removal(NamedTuple):
    """One step of removing heads of a kind of attention."""

    group: str  # the kind of attention: encoder.self, decoder.self or decoder.cross
    heads: list[Head]  # all heads that are removed at this step
    share: float  # their share of the heads of this kind


class Quality(NamedTuple):
    """The loss and the BLEU of a model; BLEU is None if the model does not translate."""

    loss: float  # bits
    bleu: float | None
    signature: str | None  # the signature that sacreBLEU gives with BLEU


def describe_cost(inspection: Inspection) -> str:
    """Returns how much `measure` computes for a model, as a text for the user."""
    num_heads = sum(attention.num_heads for attention in attentions(inspection.loaded.model))
    num_removals = count_removals(inspection)
    passes_for_importance = 2 + num_heads  # for the gradient, for the loss with all heads, and without each head
    passes_for_removals = 1 + num_removals  # with all heads, and with fewer and fewer heads
    num_passes = passes_for_importance + passes_for_removals
    cost = f"{num_passes} passes over {len(inspection.sentence_indices):,} sentences"
    if can_translate(inspection.loaded):
        cost += f", and {passes_for_removals} translations of them"
    return cost


def count_removals(inspection: Inspection) -> int:
    """Returns how many times `measure` removes heads, over all kinds of attention.

    For example, 16 heads of a kind may be removed in 4 steps: 4 heads, then 8, 12 and all 16.
    """
    num_heads_by_group: dict[str, int] = {}  # {kind of attention: its number of heads in all layers}
    for attention in attentions(inspection.loaded.model):
        num_heads_by_group[attention.group] = num_heads_by_group.get(attention.group, 0) + attention.num_heads
    num_removals = 0
    for num_heads in num_heads_by_group.values():
        steps = removal_steps(num_heads, inspection.options.steps)
        num_removals += len(steps) - 1  # the first step removes nothing
    return num_removals


def measure(inspection: Inspection) -> None:
    """Measures how much each head matters, and adds the results to the inspection.

    Each attention gets ``gradient`` and ``left_out``, the importance of its heads. The results of the model get
    ``removal``, loss and BLEU as more and more heads are removed.
    """
    importance = head_importance(inspection.loaded, inspection.batches)
    for name, importance_of_heads in importance.items():
        inspection.attention_results[name].update(round_floats(importance_of_heads))
    inspection.results["removal"] = measure_removals(inspection)


# ---- importance


def head_importance(loaded: Loaded, batches: list[Batch]) -> dict[str, dict[str, list[float]]]:
    """Returns how much each head matters to the loss, by two measures.

    ``gradient`` is how strongly the loss reacts to the strength of the head's output, in nats (see
    `importance_by_gradient`). ``left_out`` is by how much the loss grows if the head is removed, in bits. The loss is
    a mean over tokens, or, if the model is an encoder alone, over masked tokens or examples.

    Args:
        loaded: the model, with data.
        batches: the data.

    Returns:
        {attention: {measure: its value for each head}}, such as ``{"encoder.self.0": {"gradient": [0.2, 0.1],
        "left_out": [0.5, 0.3]}}``.
    """
    gradients = importance_by_gradient(loaded, batches)
    increases = importance_by_leaving_out(loaded, batches)
    return {name: {"gradient": gradients[name], "left_out": increases[name]} for name in gradients}


def importance_by_gradient(loaded: Loaded, batches: list[Batch]) -> dict[str, list[float]]:
    """Returns the importance of each head by the gradient of the loss (Michel et al. 2019, arXiv 1905.10650, eq. 2).

    In each sentence, the output of a head is multiplied by a factor, which is 1. The derivative of the loss with
    respect to the factor says how much the loss would change with a slightly stronger output. The importance is the
    absolute value of the derivative, summed over all sentences, and divided by the number of targets. The targets are
    what the model predicts: tokens, only masked tokens, or one label for each example of a classification.

    Args:
        loaded: the model, with data. The loss is the one that it was trained with.
        batches: the data.

    Returns:
        {attention: the importance of each head, in nats}.
    """
    model = loaded.model
    criterion = build_criterion(loaded)
    all_attentions = attentions(model)
    sums = {attention.name: torch.zeros(attention.num_heads) for attention in all_attentions}
    num_targets = 0
    for batch in progress(batches, "importance by gradient"):
        factors = make_factors(all_attentions, num_sentences=len(batch["id"]))  # all are 1
        with scaled_heads(model, factors):  # In here, the outputs of the heads are multiplied by the factors.
            training_loss, sample_size, log = criterion(model, batch)  # a sum over the targets of the batch
        num_targets += count_targets(sample_size, log)
        for name, derivatives in compute_derivatives(training_loss, factors).items():
            sums[name] += derivatives.abs().sum(dim=0)  # from (sentences, heads) to (heads,)
    return {name: (total / num_targets).tolist() for name, total in sums.items()}


def make_factors(all_attentions: list[Attention], num_sentences: int) -> dict[str, Tensor]:
    """Returns {attention: a factor of 1 for each sentence and head, (B, H), whose gradient can be computed}."""
    factors = {}
    for attention in all_attentions:
        factors[attention.name] = torch.ones(num_sentences, attention.num_heads, requires_grad=True)
    return factors


def compute_derivatives(training_loss: Tensor, factors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns {attention: the derivatives of the loss with respect to its factors, (B, H)}.

    An attention that has no effect on the loss is left out, such as that of an encoder to which no decoder attends.

    Args:
        training_loss: the loss of a batch, which was computed with the factors.
        factors: {attention: a factor for each sentence and head, (B, H)}.
    """
    derivatives = torch.autograd.grad(training_loss, list(factors.values()), allow_unused=True)  # in the same order
    return {name: derivative for name, derivative in zip(factors, derivatives) if derivative is not None}


def importance_by_leaving_out(loaded: Loaded, batches: list[Batch]) -> dict[str, list[float]]:
    """Returns by how much the loss grows when each head alone is removed.

    Args:
        loaded: the model, with data.
        batches: the data on which the loss is measured.

    Returns:
        {attention: the increase without each of its heads, in bits}.
    """
    loss_with_all_heads = loss(loaded, batches)
    heads: list[Head] = []
    for attention in attentions(loaded.model):
        heads += attention.heads()
    increases: dict[str, list[float]] = {}
    for head in progress(heads, "importance by leaving out"):
        with removed_heads(loaded.model, [head]):
            increase = loss(loaded, batches) - loss_with_all_heads
        increases.setdefault(head.attention, []).append(increase)
    return increases


# ---- removing heads


def measure_removals(inspection: Inspection) -> Results:
    """Measures loss and BLEU as more and more heads are removed, the least important by gradient first.

    This is done for each kind of attention alone. BLEU is measured only for models that translate; for others, it is
    None, and so are its signature and the size of the beam.

    Returns:
        for each kind of attention, a list with a value for each step: the share of heads that are removed, the loss in
        bits, and BLEU. For example, with three steps::

            {
                "groups": {
                    "encoder.self": {"share": [0, 0.5, 1], "loss": [2.1, 2.4, 5.0], "bleu": [30.1, 24.0, 0.4]},
                    ...
                },
                "signature": "BLEU|...",
                "beam": 4,
            }
    """
    loaded = inspection.loaded
    options = inspection.options
    quality_with_all_heads = measure_quality(loaded, inspection.batches, [], options)
    curves: dict[str, dict[str, list[Any]]] = {}
    for removal in progress(plan_removals(inspection), "removing heads"):
        is_first_step = not removal.heads  # The first step of each kind of attention removes no head.
        if is_first_step:
            quality = quality_with_all_heads
        else:
            quality = measure_quality(loaded, inspection.batches, removal.heads, options)
        add_to_curve(curves, removal, quality)
    return {
        "groups": round_floats(curves),
        "signature": quality_with_all_heads.signature,
        "beam": options.beam if can_translate(loaded) else None,
    }


def add_to_curve(curves: dict[str, dict[str, list[Any]]], removal: Removal, quality: Quality) -> None:
    """Adds one step to the lists of its kind of attention, which `measure_removals` shows.

    Args:
        curves: {kind of attention: {"share", "loss" or "bleu": a value for each step}}, which is changed in place.
        removal: the step.
        quality: the loss and the BLEU without the heads that it removes.
    """
    if removal.group not in curves:
        curves[removal.group] = {"share": [], "loss": [], "bleu": []}
    curve = curves[removal.group]
    curve["share"].append(removal.share)
    curve["loss"].append(quality.loss)
    curve["bleu"].append(quality.bleu)


def plan_removals(inspection: Inspection) -> list[Removal]:
    """Returns which heads are removed at each step, for one kind of attention after the other.

    For example, two steps remove none, half and all of the heads of a kind. The least important heads are removed
    first. Their importance is read from the results of each attention, where it is called ``gradient``.
    """
    removals = []
    for group, importance in group_importance(inspection.attention_results).items():
        heads = removal_order(importance)  # the least important head first
        for num_removed in removal_steps(len(heads), inspection.options.steps):
            share = num_removed / len(heads)
            removals.append(Removal(group, heads=heads[:num_removed], share=share))
    return removals


def group_importance(attention_results: dict[str, Results]) -> dict[str, dict[str, list[float]]]:
    """Returns {kind of attention: {attention: the importance of each head by gradient}}."""
    importance_by_group: dict[str, dict[str, list[float]]] = {}
    for name, results in attention_results.items():
        importance_of_group = importance_by_group.setdefault(results["group"], {})
        importance_of_group[name] = results["gradient"]
    return importance_by_group


def measure_quality(loaded: Loaded, batches: list[Batch], heads: list[Head], options: Options) -> Quality:
    """Returns the loss, and BLEU if the model translates, of a model without some heads.

    Args:
        loaded: the model, with data.
        batches: the data.
        heads: the heads that are removed.
        options: have the size of the beam and the kind of subwords.
    """
    with removed_heads(loaded.model, heads):
        loss_in_bits = loss(loaded, batches)
        if not can_translate(loaded):
            return Quality(loss_in_bits, bleu=None, signature=None)
        bleu = compute_bleu(loaded, batches, options.beam, options.remove_bpe)
    return Quality(loss_in_bits, bleu=bleu.score, signature=bleu.signature)
