"""Logits and attention weights on data, by head and by position, and those of a few single sentences."""

from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from ..attentions import attentions, find_stacks
from ..checkpoints import Batch, Loaded
from ..histograms import add_histograms
from ..measure import cumulative_singular_values, describe_weights, sentence_weights, word_dependence
from ..passes import SentenceReading, padding_index, progress, read_sentences
from ..positional import MeanByPosition
from ..subject import INPUTS, Figures, Subject, in_thousandths, rounded

HISTOGRAM_VALUES = 2000  # of each attention and sentence
SHOWN_SENTENCES = 3
LONGEST_SHOWN = 16  # tokens of a sentence that fits a picture

Samples = dict[str, dict[str, Tensor]]  # {logits or weights: {attention: values for a histogram}}


class SentenceInBatch(NamedTuple):
    """Where a sentence is."""

    is_long: bool  # too long for a picture
    number: int  # in the data
    batch: Batch
    batch_row: int


def cost(subject: Subject) -> str:
    """Returns how much `measure` computes."""
    passes = 2 if subject.initial is None else 3
    return f"{passes} passes over {len(subject.order):,} sentences, and the singular values of every head"


def measure(subject: Subject) -> None:
    """Adds where each head looks, histograms of logits and weights, and the weights for a few single sentences."""
    pad = padding_index(subject.loaded)
    trained = read_heads(subject, pad)
    initial: Samples = {"logits": {}, "weights": {}}
    if subject.initial is not None:
        initial = sample_values(subject.initial, subject.sample, pad, "initial attention")
    for kind in ("logits", "weights"):
        add_histograms(subject.attention_figures, kind, trained[kind], initial[kind])
    subject.figures["sentences"] = single_sentences(subject, pad)


def measure_without_data(attention_figures: dict[str, Figures], model: nn.Module, positions: int) -> None:
    """Adds where each head looks and its pattern, for attentions whose functions never look at the input."""
    for name, weights in weights_without_input(model, positions).items():
        figures = attention_figures[name]
        figures.update(rounded(describe_weights(weights)))
        figures["singular_values"] = rounded(cumulative_singular_values(weights))
        figures["pattern"] = in_thousandths(weights)


def weights_without_input(model: nn.Module, positions: int) -> dict[str, Tensor]:
    """Returns {attention: softmax(S) (H, T, T)}, of functions that never look at the input, for at most T tokens."""
    stacks = find_stacks(model)
    result = {}
    for attention in attentions(model):
        max_length = getattr(stacks[attention.stack], "max_length", None) or positions
        logits = attention.logits_without_input(min(positions, int(max_length)))
        if logits is not None:
            result[attention.name] = sentence_weights(logits, causal=attention.stack == "decoder")
    return result


class ValueSampler:
    """Draws logits and weights for histograms at random from the cells that a row sees."""

    def __init__(self) -> None:
        """Starts without a value, and with the same random numbers every time."""
        self.generator = torch.Generator().manual_seed(0)
        self.values: dict[str, dict[str, list[Tensor]]] = {"logits": {}, "weights": {}}

    def add(self, reading: SentenceReading, weights: Tensor) -> None:
        """Draws values of one attention and sentence."""
        visible = torch.ones_like(weights, dtype=torch.bool)
        if reading.causal:
            visible = visible.tril()
        chosen = torch.randperm(int(visible.sum()), generator=self.generator)[:HISTOGRAM_VALUES]
        for kind, matrix in (("logits", reading.logits), ("weights", weights)):
            by_attention = self.values[kind]
            by_attention.setdefault(reading.attention.name, []).append(matrix[visible][chosen])

    def samples(self) -> Samples:
        """Returns all values drawn."""
        result: Samples = {}
        for kind, by_attention in self.values.items():
            result[kind] = {name: torch.cat(values) for name, values in by_attention.items()}
        return result


def sample_values(model: nn.Module, sample: list[Batch], pad: int, title: str) -> Samples:
    """Runs a model on the data and returns values of its logits and weights for histograms."""
    sampler = ValueSampler()

    def read(reading: SentenceReading) -> None:
        sampler.add(reading, sentence_weights(reading.logits, reading.causal))

    for batch in progress(sample, title):
        read_sentences(model, batch, pad, read)
    return sampler.samples()


class HeadSums:
    """Sums over the sentences of figures of each head."""

    def __init__(self) -> None:
        """Starts without a sentence."""
        self.by_attention: dict[str, dict[str, Tensor]] = {}

    def add(self, attention: str, figures: dict[str, Tensor]) -> None:
        """Adds the figures of one attention and sentence."""
        sums = self.by_attention.setdefault(attention, {})
        for name, value in figures.items():
            sums[name] = sums[name] + value if name in sums else value


def read_heads(subject: Subject, pad: int) -> Samples:
    """Adds what `measure.describe_weights` returns, singular values, word dependence and patterns of each attention.

    Returns:
        values of logits and weights for histograms.
    """
    sampler = ValueSampler()
    mean_weights: dict[str, MeanByPosition] = {}
    mean_logits: dict[str, MeanByPosition] = {}
    sums = HeadSums()

    def read(reading: SentenceReading) -> None:
        name = reading.attention.name
        weights = sentence_weights(reading.logits, reading.causal)
        sampler.add(reading, weights)
        mean_weights.setdefault(name, MeanByPosition()).add(weights)
        mean_logits.setdefault(name, MeanByPosition()).add(reading.logits)
        sums.add(name, describe_weights(weights))
        sums.add(name, {"singular_values": cumulative_singular_values(weights)})

    def compare_with_mean(reading: SentenceReading) -> None:
        name = reading.attention.name
        rows, columns = reading.logits.shape[1:]
        weights = sentence_weights(reading.logits, reading.causal)
        by_position = sentence_weights(mean_logits[name].mean(rows, columns), reading.causal)
        sums.add(name, {"word_dependence": word_dependence(weights, by_position)})

    model = subject.loaded.model
    for batch in progress(subject.sample, "trained attention"):
        read_sentences(model, batch, pad, read)
    for batch in progress(subject.sample, "words or positions"):
        read_sentences(model, batch, pad, compare_with_mean)
    num_sentences = sum(len(batch["id"]) for batch in subject.sample)
    positions = subject.options.positions
    for name, head_sums in sums.by_attention.items():
        figures = subject.attention_figures[name]
        for figure, total in head_sums.items():
            figures[figure] = rounded(total / num_sentences)
        figures["pattern"] = in_thousandths(mean_weights[name].mean(positions, positions))
    # functions that never look at the input have a pattern that no sentence's length cuts
    for name, weights in weights_without_input(model, positions).items():
        subject.attention_figures[name]["pattern"] = in_thousandths(weights)
    return sampler.samples()


def single_sentences(subject: Subject, pad: int) -> list[Figures]:
    """Returns the tokens and the weights of every attention for a few single sentences.

    They are the first sentences of the data that fit a picture.
    """
    candidates = []
    for batch in subject.sample:
        for batch_row, number in enumerate(batch["id"].tolist()):
            is_long = count_tokens(batch, batch_row, pad) > LONGEST_SHOWN
            candidates.append(SentenceInBatch(is_long, number, batch, batch_row))
    candidates.sort(key=lambda sentence: (sentence.is_long, sentence.number))
    return [sentence_figures(subject.loaded, sentence, pad) for sentence in candidates[:SHOWN_SENTENCES]]


def sentence_figures(loaded: Loaded, sentence: SentenceInBatch, pad: int) -> Figures:
    """Returns the number, the tokens and the attention weights of one sentence."""
    weights: dict[str, Any] = {}

    def read(reading: SentenceReading) -> None:
        if reading.batch_row == sentence.batch_row:
            head_weights = sentence_weights(reading.logits, reading.causal)
            weights[reading.attention.name] = in_thousandths(head_weights)

    tokens = read_sentences(loaded.model, sentence.batch, pad, read)
    words = {stack: token_names(loaded, stack, rows[sentence.batch_row], pad) for stack, rows in tokens.items()}
    return {"number": sentence.number, "tokens": words, "weights": weights}


def count_tokens(batch: Batch, batch_row: int, pad: int) -> int:
    """Returns the number of tokens of a sentence, of its longer side."""
    counts = []
    for name in INPUTS:
        if name in batch["net_input"]:
            counts.append(int(batch["net_input"][name][batch_row].ne(pad).sum()))
    return max(counts)


def token_names(loaded: Loaded, stack: str, tokens: Tensor, pad: int) -> list[str]:
    """Returns the tokens of a sentence as the dictionary writes them."""
    dictionary = loaded.task.source_dictionary
    if stack == "decoder" and loaded.task.target_dictionary:
        dictionary = loaded.task.target_dictionary
    return [dictionary[token] for token in tokens.tolist() if token != pad]
