"""Measures the loss with heads of self-attention that look by position alone, by their average on the training data."""

from torch import Tensor

from .. import words
from ..arguments import AVERAGED_SENTENCES
from ..attentions import Head, self_attentions
from ..inspection import Inspection, round_floats
from ..words import Averages, ReplacedHead

TRAINING_SUBSET = "train"


def describe_cost(inspection: Inspection) -> str:
    """Returns how much `measure` computes for a model, as a text for the user."""
    num_heads = sum(attention.num_heads for attention in self_attentions(inspection.loaded.model))
    num_passes = 2 * num_heads  # each head alone, and more and more heads
    return (
        f"a pass over up to {count_training_sentences(inspection):,} sentences of {TRAINING_SUBSET}, then "
        f"{num_passes} passes over {len(inspection.sentence_indices):,} sentences"
    )


def count_training_sentences(inspection: Inspection) -> int:
    """Returns over how many sentences attention is averaged at most."""
    if inspection.options.sentences is None:
        return AVERAGED_SENTENCES
    return min(inspection.options.sentences, AVERAGED_SENTENCES)


def measure(inspection: Inspection) -> None:
    """Measures the loss when heads of self-attention do not see the words, and adds the results to the inspection.

    To replace a head means to give it fixed logits, which depend on the positions of two tokens and not on the words.
    Their softmax is as near as possible to the head's mean attention weights over training sentences.

    The losses are those of the inspection's sentences.
    """
    loaded = inspection.loaded
    batches = inspection.batches

    # What a replaced head gets: {self-attention: fixed logits of its heads}.
    averages = words.average(loaded, TRAINING_SUBSET, count_training_sentences(inspection))
    fixed_logits = compute_fixed_logits(averages, length=inspection.longest_sentence())

    # Each head is replaced alone.
    heads = list_self_attention_heads(inspection)
    loss_by_head = words.losses_with_single_heads_replaced(loaded, batches, fixed_logits, heads)
    add_increases(inspection, loss_by_head)

    # Then one head is replaced, then two heads, and so on, beginning with those that raised the loss least.
    replacements: list[ReplacedHead] = []
    for replacement in words.replace_cheapest_heads_first(loaded, batches, fixed_logits, loss_by_head):
        replacements.append(replacement)  # the head that is replaced in addition, and the loss
    add_losses(inspection, replacements, num_training_sentences=averages.sentences)


def compute_fixed_logits(averages: Averages, length: int) -> dict[str, Tensor]:
    """Returns {self-attention: the logits of its heads by position, (H, length, length)} for sentences of any words.

    Args:
        averages: the self-attention of the model, averaged over training sentences.
        length: the number of tokens of the longest sentence.
    """
    return {name: constants.matrix(length) for name, constants in averages.constants.items()}


def list_self_attention_heads(inspection: Inspection) -> list[Head]:
    """Returns all heads of self-attention of a model."""
    heads: list[Head] = []
    for attention in self_attentions(inspection.loaded.model):
        heads += attention.heads()
    return heads


def add_increases(inspection: Inspection, loss_by_head: dict[Head, float]) -> None:
    """Adds ``without_words`` to the results of each self-attention: for each head, by how many bits the loss grows.

    Args:
        inspection: has the loss with no head replaced.
        loss_by_head: {head: the loss when it alone is replaced}.
    """
    for attention in self_attentions(inspection.loaded.model):
        increases = [loss_by_head[head] - inspection.loss for head in attention.heads()]
        inspection.attention_results[attention.name]["without_words"] = round_floats(increases)


def add_losses(inspection: Inspection, replaced_heads: list[ReplacedHead], num_training_sentences: int) -> None:
    """Adds ``words`` to the results of the model: the loss as more and more heads are replaced.

    For example, with two heads, of which the second one is replaced first::

        {"heads": [["encoder.self.0", 1], ["encoder.self.0", 0]], "loss": [2.1, 2.2, 2.9], "sentences": 1000}

    The losses are those with none, one and both of the heads replaced.

    Args:
        inspection: has the loss with no head replaced.
        replaced_heads: the heads in the order of their replacement, with the losses.
        num_training_sentences: the number of sentences over which attention is averaged.
    """
    heads = [replaced.head for replaced in replaced_heads]
    losses = [inspection.loss, *(replaced.loss for replaced in replaced_heads)]
    inspection.results["words"] = round_floats({"heads": heads, "loss": losses, "sentences": num_training_sentences})
