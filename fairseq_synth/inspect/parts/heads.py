"""How much each head matters: to the loss alone, and as more and more heads are removed."""

from typing import Any, NamedTuple

import torch

from ..attentions import Attention, Head, attentions
from ..bleu import can_translate, compute_bleu
from ..checkpoints import Batch, Loaded
from ..hooks import masked_heads, removed_heads
from ..measure import removal_order, removal_steps
from ..passes import build_criterion, count_targets, loss, progress
from ..subject import Figures, Options, Subject, rounded


class Removal(NamedTuple):
    """One step of removing heads: the heads of a group that are gone."""

    group: str
    heads: list[Head]
    share: float  # of the group's heads


class Quality(NamedTuple):
    """What a model reaches."""

    loss: float  # bits
    bleu: float | None
    signature: str | None


def cost(subject: Subject) -> str:
    """Returns how much `measure` computes."""
    all_attentions = attentions(subject.loaded.model)
    num_heads = sum(attention.num_heads for attention in all_attentions)
    heads_of_group: dict[str, int] = {}
    for attention in all_attentions:
        heads_of_group[attention.group] = heads_of_group.get(attention.group, 0) + attention.num_heads
    num_removals = 0
    for size in heads_of_group.values():
        num_removals += len(removal_steps(size, subject.options.steps)) - 1  # the first step removes nothing
    passes = 2 + num_heads + 1 + num_removals  # gradient, all heads; without each head; all heads, without some
    text = f"{passes} passes over {len(subject.order):,} sentences"
    if can_translate(subject.loaded):
        text += f", and {1 + num_removals} translations of them"
    return text


def measure(subject: Subject) -> None:
    """Adds the importance of each head, and loss and BLEU as more and more heads are removed."""
    importance = head_importance(subject.loaded, subject.sample)
    for name, figures in importance.items():
        subject.attention_figures[name].update(rounded(figures))
    subject.figures["removal"] = removal_curves(subject)


def head_importance(loaded: Loaded, sample: list[Batch]) -> dict[str, dict[str, list[float]]]:
    """Returns how much each head matters to the loss.

    Returns:
        {attention: ``gradient``, the mean over the sentences of the absolute derivative of the training's loss with
        respect to a factor of 1 on the head (Michel et al. 2019, arXiv 1905.10650, eq. 2), in nats; ``left_out``, by
        how much the loss grows without the head, in bits}. Both are by token, for an encoder by masked token or
        example.
    """
    importance = {}
    for name, gradient in importance_by_gradient(loaded, sample).items():
        importance[name] = {"gradient": gradient, "left_out": []}
    loss_of_all = loss(loaded, sample)
    heads = [head for attention in attentions(loaded.model) for head in attention.heads()]
    for head in progress(heads, "importance by leaving out"):
        with removed_heads(loaded.model, [head]):
            increase = loss(loaded, sample) - loss_of_all
        importance[head.attention]["left_out"].append(increase)
    return importance


def importance_by_gradient(loaded: Loaded, sample: list[Batch]) -> dict[str, list[float]]:
    """Returns {attention: the importance of each head by the gradient}, see `head_importance`."""
    model = loaded.model
    criterion = build_criterion(loaded)
    all_attentions = attentions(model)
    sums = {attention.name: torch.zeros(attention.num_heads) for attention in all_attentions}
    num_targets = 0
    for batch in progress(sample, "importance by gradient"):
        masks = make_masks(all_attentions, batch)
        with masked_heads(model, masks):
            value, sample_size, log = criterion(model, batch)
        # the gradient is None for an encoder that the decoder does not attend to
        gradients = torch.autograd.grad(value, list(masks.values()), allow_unused=True)
        num_targets += count_targets(sample_size, log)
        for name, gradient in zip(masks, gradients):
            if gradient is not None:
                sums[name] += gradient.abs().sum(dim=0)
    return {name: (total / num_targets).tolist() for name, total in sums.items()}


def make_masks(all_attentions: list[Attention], batch: Batch) -> dict[str, torch.Tensor]:
    """Returns {attention: a factor of 1 for each sentence and head (B, H)}, which require gradients."""
    bsz = len(batch["id"])
    masks = {}
    for attention in all_attentions:
        masks[attention.name] = torch.ones(bsz, attention.num_heads, requires_grad=True)
    return masks


def removal_curves(subject: Subject) -> Figures:
    """Returns loss, and for a translation BLEU, as more heads are removed, the least important by gradient first.

    Returns:
        ``groups``, {group: ``share`` of its heads removed, ``loss`` in bits, ``bleu`` or None for each step};
        ``signature`` of BLEU and the ``beam``, or None.
    """
    loaded = subject.loaded
    curves: dict[str, dict[str, list[Any]]] = {}
    quality_of_all = quality_without(loaded, subject.sample, [], subject.options)
    for removal in progress(plan_removals(subject), "removing heads"):
        quality = quality_of_all
        if removal.heads:
            quality = quality_without(loaded, subject.sample, removal.heads, subject.options)
        curve = curves.setdefault(removal.group, {"share": [], "loss": [], "bleu": []})
        curve["share"].append(removal.share)
        curve["loss"].append(quality.loss)
        curve["bleu"].append(quality.bleu)
    return {
        "groups": rounded(curves),
        "signature": quality_of_all.signature,
        "beam": subject.options.beam if can_translate(loaded) else None,
    }


def plan_removals(subject: Subject) -> list[Removal]:
    """Returns all steps of removing heads, group by group, by the importance that is measured already."""
    importance: dict[str, dict[str, list[float]]] = {}
    for name, figures in subject.attention_figures.items():
        importance.setdefault(figures["group"], {})[name] = figures["gradient"]
    removals = []
    for group, by_attention in importance.items():
        order = removal_order(by_attention)
        for count in removal_steps(len(order), subject.options.steps):
            removals.append(Removal(group, order[:count], count / len(order)))
    return removals


def quality_without(loaded: Loaded, sample: list[Batch], heads: list[Head], options: Options) -> Quality:
    """Returns what a model reaches without some heads."""
    with removed_heads(loaded.model, heads):
        value = loss(loaded, sample)
        if not can_translate(loaded):
            return Quality(value, None, None)
        bleu = compute_bleu(loaded, sample, options.beam, options.remove_bpe)
    return Quality(value, bleu.score, bleu.signature)
