"""Measures logits and attention weights on data: by head, by position, and of a few single sentences."""

from collections import defaultdict
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from ..attentions import attentions, find_stacks
from ..checkpoints import Batch, Loaded, list_inputs, stack_tokens
from ..histograms import add_histograms
from ..inspection import Inspection, Results, round_floats, to_thousandths
from ..measure import cumulative_singular_values, describe_weights, sentence_weights, word_dependence
from ..passes import SentenceReading, padding_index, progress, read_sentences
from ..positional import MeanByPosition

HISTOGRAM_VALUES = 2000  # how many values each attention and sentence adds to a histogram
SHOWN_SENTENCES = 3
LONGEST_SHOWN = 16  # tokens of a sentence that fits a picture

Samples = dict[str, dict[str, Tensor]]  # {logits or weights: {attention: values for a histogram}}


def describe_cost(inspection: Inspection) -> str:
    """Returns how much `measure` computes for a model, as a text for the user."""
    num_passes = 2 if inspection.initial_model is None else 3
    num_sentences = len(inspection.sentence_indices)
    return f"{num_passes} passes over {num_sentences:,} sentences, and the singular values of every head"


def measure(inspection: Inspection) -> None:
    """Measures the attention of a model on the data, and adds the results to the inspection.

    Each attention gets metrics that say where its heads look, its mean weights, and histograms of its logits and
    weights. The results of the model get ``sentences``, the weights for a few single sentences.
    """
    pad = padding_index(inspection.loaded)
    trained = read_trained_model(inspection, pad)
    add_head_results(inspection, trained.metrics)
    initial_values: Samples = {"logits": {}, "weights": {}}
    if inspection.initial_model is not None:
        initial_values = sample_values(inspection.initial_model, inspection.batches, pad, "initial attention")
    for kind in ("logits", "weights"):
        add_histograms(inspection.attention_results, kind, trained.values[kind], initial_values[kind])
    inspection.results["sentences"] = read_single_sentences(inspection, pad)


# ---- without data


def measure_without_data(model: nn.Module, positions: int) -> dict[str, Results]:
    """Measures those attentions of a model whose weights do not depend on the input.

    Args:
        model: the model.
        positions: for how many tokens the weights are computed.

    Returns:
        {attention: its results}: metrics that say where the heads look, cumulative singular values as
        ``singular_values``, and the weights themselves as ``pattern``.
    """
    results: dict[str, Results] = {}
    for name, weights in weights_without_input(model, positions).items():
        results[name] = {
            **round_floats(describe_weights(weights)),
            "singular_values": round_floats(cumulative_singular_values(weights)),
            "pattern": to_thousandths(weights),
        }
    return results


def weights_without_input(model: nn.Module, positions: int) -> dict[str, Tensor]:
    """Returns the weights of those attentions of a model whose weights do not depend on the input.

    Args:
        model: the model.
        positions: for how many tokens T the weights are computed, unless the model reads only shorter sentences. Then
            T is the model's own limit.

    Returns:
        {attention: weights (H, T, T)}. All of them are self-attentions, as cross-attention depends on the input.
    """
    stacks = find_stacks(model)
    result = {}
    for attention in attentions(model):
        length = positions
        longest_sentence = getattr(stacks[attention.stack], "max_length", None)  # only some stacks have this limit
        if longest_sentence is not None:
            length = min(length, longest_sentence)
        logits = attention.logits_without_input(length)
        if logits is not None:
            is_in_decoder = attention.stack == "decoder"  # where no token sees later ones
            result[attention.name] = sentence_weights(logits, causal=is_in_decoder)
    return result


# ---- values for histograms


class ValueSampler:
    """Draws random samples of logits and attention weights, for histograms."""

    def __init__(self) -> None:
        """Starts without a value. The random numbers are the same every time."""
        self.generator = torch.Generator().manual_seed(0)
        # {attention: the values of each sentence}
        self.logits: defaultdict[str, list[Tensor]] = defaultdict(list)
        self.weights: defaultdict[str, list[Tensor]] = defaultdict(list)

    def add_sentence(self, reading: SentenceReading, weights: Tensor) -> None:
        """Adds the logits and the weights of some random cells of a sentence, for the histograms of one attention.

        A cell is a head, a row and a column. Up to `HISTOGRAM_VALUES` different cells are drawn, only from the cells
        whose column is visible to the row.

        Args:
            reading: the attention, and its logits (H, T, S) for one sentence.
            weights: the softmax of these logits, (H, T, S).
        """
        is_visible = torch.ones_like(weights, dtype=torch.bool)
        if reading.causal:
            is_visible = is_visible.tril()  # row i sees the columns 0 to i
        # The N visible cells of all heads in one list: (N,), in the same order for logits and weights.
        visible_logits = reading.logits[is_visible]
        visible_weights = weights[is_visible]
        shuffled_cells = torch.randperm(len(visible_logits), generator=self.generator)
        drawn_cells = shuffled_cells[:HISTOGRAM_VALUES]
        name = reading.attention.name
        self.logits[name].append(visible_logits[drawn_cells])
        self.weights[name].append(visible_weights[drawn_cells])

    def samples(self) -> Samples:
        """Returns the values of all sentences: {``logits`` or ``weights``: {attention: values}}."""
        return {
            "logits": {name: torch.cat(values) for name, values in self.logits.items()},
            "weights": {name: torch.cat(values) for name, values in self.weights.items()},
        }


def sample_values(model: nn.Module, batches: list[Batch], pad: int, title: str) -> Samples:
    """Runs a model on the data, and chooses some of its logits and weights at random for histograms.

    Args:
        model: the model, in eval mode.
        batches: the data.
        pad: the index of padding.
        title: the text beside the progress bar.

    Returns:
        {``logits`` or ``weights``: {attention: values}}.
    """
    sampler = ValueSampler()
    for batch in progress(batches, title):
        for reading in read_sentences(model, batch, pad):
            weights = sentence_weights(reading.logits, reading.causal)
            sampler.add_sentence(reading, weights)
    return sampler.samples()


# ---- metrics of heads


class HeadMetrics:
    """Collects metrics, mean weights and mean logits of all heads, attention by attention and sentence by sentence."""

    def __init__(self) -> None:
        """Starts without a sentence."""
        self.sums: dict[str, dict[str, Tensor]] = {}  # {attention: {metric: its sum over the sentences}}
        self.mean_weights: dict[str, MeanByPosition] = {}  # {attention: its weights}
        self.mean_logits: dict[str, MeanByPosition] = {}  # {attention: its logits}

    def add_sentence(self, reading: SentenceReading, weights: Tensor) -> None:
        """Adds the metrics, weights and logits of one attention for one sentence, in the first pass over the data.

        The mean logits of all sentences are known after this pass. `add_word_dependence` needs them, in a second pass.

        Args:
            reading: the attention, and its logits (H, T, S) for the sentence.
            weights: the softmax of these logits, (H, T, S).
        """
        name = reading.attention.name
        self.mean_weights.setdefault(name, MeanByPosition()).add(weights)
        self.mean_logits.setdefault(name, MeanByPosition()).add(reading.logits)
        metrics = describe_weights(weights)  # one value for each head
        metrics["singular_values"] = cumulative_singular_values(weights)  # several values for each head
        self.add_metrics(name, metrics)

    def add_word_dependence(self, reading: SentenceReading) -> None:
        """Adds how strongly the weights of one attention depend on the words of one sentence.

        The weights are compared with the softmax of the mean logits of all sentences, which depends on positions alone.
        So this is called in a second pass over the data, when these means are known.
        """
        name = reading.attention.name
        num_rows, num_columns = reading.logits.shape[1:]
        mean_logits = self.mean_logits[name].mean_of_first(num_rows, num_columns)
        weights = sentence_weights(reading.logits, reading.causal)
        weights_by_position = sentence_weights(mean_logits, reading.causal)
        self.add_metrics(name, {"word_dependence": word_dependence(weights, weights_by_position)})

    def add_metrics(self, attention: str, metrics: dict[str, Tensor]) -> None:
        """Adds {metric: values} of one attention and sentence to the sums."""
        sums = self.sums.setdefault(attention, {})
        for metric, values in metrics.items():
            if metric in sums:
                sums[metric] = sums[metric] + values
            else:
                sums[metric] = values


class TrainedAttention(NamedTuple):
    """What is collected while the trained model reads the data."""

    metrics: HeadMetrics
    values: Samples  # for histograms


def read_trained_model(inspection: Inspection, pad: int) -> TrainedAttention:
    """Runs the trained model on the data twice, and collects the metrics of its heads and values for histograms.

    Args:
        inspection: the inspection, with data.
        pad: the index of padding.
    """
    model = inspection.loaded.model
    metrics = HeadMetrics()
    sampler = ValueSampler()
    for batch in progress(inspection.batches, "trained attention"):
        for reading in read_sentences(model, batch, pad):
            weights = sentence_weights(reading.logits, reading.causal)
            sampler.add_sentence(reading, weights)
            metrics.add_sentence(reading, weights)
    # The dependence on words compares each sentence with the mean over all sentences, which is known only now.
    for batch in progress(inspection.batches, "words or positions"):
        for reading in read_sentences(model, batch, pad):
            metrics.add_word_dependence(reading)
    return TrainedAttention(metrics, values=sampler.samples())


def add_head_results(inspection: Inspection, metrics: HeadMetrics) -> None:
    """Adds the metrics, as means over the sentences, and the mean weights to the results of each attention.

    Args:
        inspection: its `attention_results` are changed in place.
        metrics: has the sums of the metrics, and the mean weights, over the sentences of the data.
    """
    num_sentences = sum(len(batch["id"]) for batch in inspection.batches)
    patterns = choose_patterns(inspection, metrics)
    for name, sums_by_metric in metrics.sums.items():
        results = inspection.attention_results[name]
        for metric, sum_over_sentences in sums_by_metric.items():
            results[metric] = round_floats(sum_over_sentences / num_sentences)
        results["pattern"] = to_thousandths(patterns[name])


def choose_patterns(inspection: Inspection, metrics: HeadMetrics) -> dict[str, Tensor]:
    """Returns {attention: its mean weights for the first positions, (H, T, S)}.

    Args:
        inspection: has the model, and the largest T and S in its options.
        metrics: has the mean weights over the sentences of the data.
    """
    positions = inspection.options.positions
    patterns = {}
    for name, mean in metrics.mean_weights.items():
        patterns[name] = mean.mean_of_first(rows=positions, columns=positions)
    # Weights that do not depend on the input are the same in every sentence. They are known for all positions, also for
    # those that no sentence of the data has.
    patterns.update(weights_without_input(inspection.loaded.model, positions))
    return patterns


# ---- single sentences


class SentenceInBatch(NamedTuple):
    """A sentence of the data, and where it is."""

    number: int  # in the data
    batch: Batch
    batch_row: int


def read_single_sentences(inspection: Inspection, pad: int) -> list[Results]:
    """Returns the tokens and the attention weights of `SHOWN_SENTENCES` single sentences, for pictures.

    The first sentences of the data that fit into a picture are chosen. If there are too few of them, the first longer
    sentences are added.

    Args:
        inspection: the inspection, with data.
        pad: the index of padding.
    """
    fitting = []
    too_long = []
    for sentence in list_sentences(inspection.batches):
        if count_longer_side(sentence.batch, sentence.batch_row, pad) <= LONGEST_SHOWN:
            fitting.append(sentence)
        else:
            too_long.append(sentence)
    shown = [*fitting, *too_long][:SHOWN_SENTENCES]
    return [read_single_sentence(inspection.loaded, sentence, pad) for sentence in shown]


def list_sentences(batches: list[Batch]) -> list[SentenceInBatch]:
    """Returns all sentences of some batches, in the order of the data."""
    sentences = []
    for batch in batches:
        for batch_row, number in enumerate(batch["id"].tolist()):
            sentences.append(SentenceInBatch(number=number, batch=batch, batch_row=batch_row))
    return sorted(sentences, key=lambda sentence: sentence.number)


def read_single_sentence(loaded: Loaded, sentence: SentenceInBatch, pad: int) -> Results:
    """Returns the tokens and the attention weights of a sentence. The model is run on the sentence's whole batch.

    Args:
        loaded: the model, with data.
        sentence: the sentence.
        pad: the index of padding.

    Returns:
        ``number``, the sentence's place in the data; ``tokens``, {``encoder`` or ``decoder``: the tokens that it
        reads}; ``weights``, {attention: (H, T, S), in thousandths}.
    """
    weights = {}
    for reading in read_sentences(loaded.model, sentence.batch, pad):
        is_of_this_sentence = reading.batch_row == sentence.batch_row
        if is_of_this_sentence:
            weights_of_heads = sentence_weights(reading.logits, reading.causal)
            weights[reading.attention.name] = to_thousandths(weights_of_heads)
    tokens = {}
    for stack in find_stacks(loaded.model):
        token_indices = stack_tokens(sentence.batch, stack)[sentence.batch_row]
        tokens[stack] = token_strings(loaded, stack, token_indices, pad)
    return {"number": sentence.number, "tokens": tokens, "weights": weights}


def count_longer_side(batch: Batch, batch_row: int, pad: int) -> int:
    """Returns the number of tokens of a sentence or of its translation, whichever is longer, without padding."""
    return max(int(tokens[batch_row].ne(pad).sum()) for tokens in list_inputs(batch))


def token_strings(loaded: Loaded, stack: str, token_indices: Tensor, pad: int) -> list[str]:
    """Returns the tokens of a sentence as the dictionary writes them, without padding.

    Args:
        loaded: the model, whose task has the dictionaries.
        stack: ``encoder`` or ``decoder``, which reads the tokens.
        token_indices: (T,).
        pad: the index of padding.
    """
    dictionary = loaded.task.source_dictionary
    if stack == "decoder" and loaded.task.target_dictionary:
        dictionary = loaded.task.target_dictionary
    return [dictionary[index] for index in token_indices.tolist() if index != pad]
