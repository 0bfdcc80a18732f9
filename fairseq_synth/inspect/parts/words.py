"""Measures the loss with heads of self-attention that look by position alone, by their average on the training data."""

from .. import words
from ..arguments import AVERAGED_SENTENCES
from ..attentions import Head, self_attentions
from ..inspection import Inspection, round_floats

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
    """Measures the loss with heads that look by position alone, and adds the results to the inspection.

    To replace a head means to give it other logits, which depend on the positions of two tokens and not on the words.
    Their attention weights are as near as possible to the average of the head's weights over training sentences.

    First, each head is replaced alone. The results of each self-attention get ``without_words``: for each of its heads,
    by how many bits the loss grows. Then more and more heads are replaced together, first those whose replacement costs
    least. The results of the model get ``words``, which has these keys:

    - ``heads``: the heads in the order of their replacement, as [attention, number of the head];
    - ``loss``: the loss in bits with none, one, … all of them replaced;
    - ``sentences``: the number of sentences over which attention is averaged.
    """
    loaded = inspection.loaded
    averages = words.average(loaded, TRAINING_SUBSET, count_training_sentences(inspection))
    length = inspection.longest_sentence()
    # {self-attention: the logits that replace those of its heads, (H, length, length)}
    position_logits = {name: constants.matrix(length) for name, constants in averages.constants.items()}

    # Each head is replaced alone.
    all_heads = list_self_attention_heads(inspection)
    losses_of_single_heads = words.losses_without_words(loaded, inspection.batches, position_logits, all_heads)
    add_without_words(inspection, losses_of_single_heads)

    # More and more heads are replaced together.
    replaced_heads = []
    losses_so_far = [inspection.loss]
    for replaced in words.cheapest_first(loaded, inspection.batches, position_logits, losses_of_single_heads):
        replaced_heads.append(replaced.head)
        losses_so_far.append(replaced.loss)
    inspection.results["words"] = round_floats(
        {"heads": replaced_heads, "loss": losses_so_far, "sentences": averages.sentences}
    )


def list_self_attention_heads(inspection: Inspection) -> list[Head]:
    """Returns all heads of self-attention of a model."""
    heads: list[Head] = []
    for attention in self_attentions(inspection.loaded.model):
        heads += attention.heads()
    return heads


def add_without_words(inspection: Inspection, losses: dict[Head, float]) -> None:
    """Adds ``without_words`` to the results of each self-attention: by how many bits the loss grows, for each head.

    Args:
        inspection: has the loss with no head replaced.
        losses: {head: the loss when it alone is replaced}.
    """
    for attention in self_attentions(inspection.loaded.model):
        increases = [losses[head] - inspection.loss for head in attention.heads()]
        inspection.attention_results[attention.name]["without_words"] = round_floats(increases)
