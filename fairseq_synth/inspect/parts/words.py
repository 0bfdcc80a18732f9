"""The loss with heads of self-attention that look by position alone, by their average over the training data."""

from .. import words
from ..attentions import Head, self_attentions
from ..subject import Subject, rounded

TRAINING_SUBSET = "train"


def cost(subject: Subject) -> str:
    """Returns how much `measure` computes."""
    num_heads = sum(attention.num_heads for attention in self_attentions(subject.loaded.model))
    return (
        f"a pass over up to {count_training_sentences(subject):,} sentences of {TRAINING_SUBSET}, then "
        f"{2 * num_heads} passes over {len(subject.order):,} sentences"
    )


def count_training_sentences(subject: Subject) -> int:
    """Returns how many sentences attention is averaged over at most."""
    if subject.options.sentences is None:
        return words.SENTENCES
    return min(subject.options.sentences, words.SENTENCES)


def measure(subject: Subject) -> None:
    """Adds the loss when one head is replaced, and when more and more heads are, the cheapest first.

    Each self-attention gets ``without_words``: for each head the loss with its attention replaced, less the loss, in
    bits. ``words`` gets ``heads``, as [attention, head], ``loss`` in bits when so many of them are replaced, from none
    to all, and the number of ``sentences`` that attention is averaged over.
    """
    loaded = subject.loaded
    averages = words.average(loaded, TRAINING_SUBSET, count_training_sentences(subject))
    length = subject.longest_input()
    logits = {name: constants.matrix(length) for name, constants in averages.constants.items()}
    heads: list[Head] = []
    for attention in self_attentions(loaded.model):
        heads += attention.heads()
    losses = words.losses_without_words(loaded, subject.sample, logits, heads)
    for attention in self_attentions(loaded.model):
        increases = [losses[head] - subject.loss for head in attention.heads()]
        subject.attention_figures[attention.name]["without_words"] = rounded(increases)
    replaced_heads = []
    losses_so_far = [subject.loss]
    for head, value in words.cheapest_first(loaded, subject.sample, logits, losses):
        replaced_heads.append(head)
        losses_so_far.append(value)
    subject.figures["words"] = rounded(
        {"heads": replaced_heads, "loss": losses_so_far, "sentences": averages.sentences}
    )
