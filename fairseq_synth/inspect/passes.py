"""Runs forward passes over data, and returns what the attentions compute in them, or the loss."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]  # comes with fairseq

from .attentions import Attention
from .checkpoints import Batch, Loaded, stack_tokens
from .hooks import AttentionReading, reading_logits


class SentenceReading(NamedTuple):
    """What one attention has computed for one sentence, without padding."""

    attention: Attention
    batch_row: int  # the place of the sentence in its batch
    logits: Tensor  # (H, T, S), before any mask
    causal: bool  # whether row i sees no column after i


def progress(items: Iterable[Any], title: str) -> Any:
    """Returns the items, and shows a progress bar on standard error while they are iterated over."""
    return tqdm(list(items), desc=title, leave=True, mininterval=1.0)


def padding_index(loaded: Loaded) -> int:
    """Returns the index of padding in the dictionaries of a model."""
    dictionary = loaded.task.target_dictionary or loaded.task.source_dictionary
    return int(dictionary.pad())


@torch.no_grad()
def read_sentences(model: nn.Module, batch: Batch, pad: int) -> list[SentenceReading]:
    """Runs a model on a batch, and returns what each attention has computed for each sentence.

    Args:
        model: the model, in eval mode.
        batch: its sentences are padded on the right.
        pad: the index of padding.

    Returns:
        First all sentences of one attention, then all sentences of the next, and so on.
    """
    readings_of_batch: list[AttentionReading] = []  # one for each attention
    with reading_logits(model, on_logits=readings_of_batch.append):
        model(**batch["net_input"])
    result = []
    for reading in readings_of_batch:
        attention = reading.attention
        # The queries are the tokens of the attention's own stack. The keys of cross-attention are the encoder's tokens.
        key_stack = "encoder" if attention.kind == "cross" else attention.stack
        query_counts = count_tokens(batch, attention.stack, pad)  # one for each sentence
        key_counts = count_tokens(batch, key_stack, pad)
        for batch_row in range(len(query_counts)):
            num_rows = query_counts[batch_row]  # T
            num_columns = key_counts[batch_row]  # S
            logits_of_sentence = reading.logits[batch_row, :, :num_rows, :num_columns]  # (H, T, S), without padding
            result.append(SentenceReading(attention, batch_row, logits_of_sentence, reading.causal))
    return result


def count_tokens(batch: Batch, stack: str, pad: int) -> list[int]:
    """Returns the number of tokens of each sentence of a batch, without padding.

    Args:
        batch: a batch of fairseq.
        stack: ``encoder`` or ``decoder``, which reads the tokens.
        pad: the index of padding.
    """
    counts: list[int] = stack_tokens(batch, stack).ne(pad).sum(dim=1).tolist()
    return counts


def build_criterion(loaded: Loaded) -> Any:
    """Returns the criterion of fairseq that computes the loss of the model's training, in eval mode."""
    return loaded.task.build_criterion(loaded.cfg.criterion).eval()


@torch.no_grad()
def loss(loaded: Loaded, batches: Sequence[Batch]) -> float:
    """Returns the loss on the data in bits, without label smoothing, as fairseq-validate reports it.

    It is the mean over what `count_targets` counts: tokens for a decoder, masked tokens or examples for an encoder.

    Args:
        loaded: the model, with data.
        batches: the data.
    """
    criterion = build_criterion(loaded)
    sum_of_losses = 0.0
    num_targets = 0
    for batch in batches:
        # Both losses are sums over the targets of the batch.
        smoothed_loss, sample_size, log = criterion(loaded.model, batch)
        # A criterion that smooths the labels logs the loss without smoothing, as "nll_loss". Others do not smooth.
        loss_of_batch = log.get("nll_loss", smoothed_loss)
        sum_of_losses += float(loss_of_batch)
        num_targets += count_targets(sample_size, log)
    loss_in_nats = sum_of_losses / num_targets
    return loss_in_nats / math.log(2)


def count_targets(sample_size: Any, log: dict[str, Any]) -> int:
    """Returns the number by which fairseq divides the loss of a batch: its tokens, masked tokens or examples.

    Args:
        sample_size: the second value that a criterion returns.
        log: the third value that a criterion returns.
    """
    return int(log["ntokens"] if "nll_loss" in log else sample_size)
