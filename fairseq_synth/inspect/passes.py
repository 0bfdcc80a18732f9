"""Runs forward passes over data, and returns what the attentions compute in them, or the loss."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]  # comes with fairseq

from .attentions import Attention
from .checkpoints import Batch, Loaded
from .hooks import Reading, input_tokens, reading


class SentenceReading(NamedTuple):
    """What one attention has computed for one sentence, without padding."""

    attention: Attention
    batch_row: int  # the place of the sentence in its batch
    logits: Tensor  # (H, T, S), before any mask
    causal: bool


def progress(items: Iterable[Any], title: str) -> Any:
    """Returns the items with a progress bar on standard error."""
    return tqdm(list(items), desc=title, leave=True, mininterval=1.0)


def padding_index(loaded: Loaded) -> int:
    """Returns the index of padding in the model's dictionaries."""
    dictionary = loaded.task.target_dictionary or loaded.task.source_dictionary
    return int(dictionary.pad())


@torch.no_grad()
def read_sentences(
    model: nn.Module, batch: Batch, pad: int, read: Callable[[SentenceReading], None]
) -> dict[str, Tensor]:
    """Runs a model on a batch and calls `read` for each attention and sentence.

    Args:
        pad: the index of padding.

    Returns:
        {stack: its input tokens (B, T)}.
    """
    readings: list[Reading] = []
    with input_tokens(model) as tokens, reading(model, readings.append):
        model(**batch["net_input"])
    lengths = {}
    for stack, stack_tokens in tokens.items():
        lengths[stack] = stack_tokens.ne(pad).sum(dim=1).tolist()
    for attention, logits, causal in readings:
        key_stack = "encoder" if attention.kind == "cross" else attention.stack
        for batch_row, (rows, columns) in enumerate(zip(lengths[attention.stack], lengths[key_stack])):
            read(SentenceReading(attention, batch_row, logits[batch_row, :, :rows, :columns], causal))
    return tokens


def build_criterion(loaded: Loaded) -> Any:
    """Returns the loss of the model's training, in eval mode."""
    return loaded.task.build_criterion(loaded.cfg.criterion).eval()


@torch.no_grad()
def loss(loaded: Loaded, sample: list[Batch]) -> float:
    """Returns the loss on the data in bits, without label smoothing, as fairseq-validate reports it.

    It is divided by the tokens, for an encoder by the masked tokens or the examples; see `count_targets`.
    """
    criterion = build_criterion(loaded)
    total = 0.0
    targets = 0
    for batch in sample:
        value, sample_size, log = criterion(loaded.model, batch)
        total += float(log.get("nll_loss", value))
        targets += count_targets(sample_size, log)
    return total / targets / math.log(2)


def count_targets(sample_size: Any, log: dict[str, Any]) -> int:
    """Returns what fairseq divides a batch's loss by: its tokens, masked tokens or examples.

    Args:
        sample_size: the second value that a criterion returns.
        log: the third value that a criterion returns.
    """
    return int(log["ntokens"] if "nll_loss" in log else sample_size)
