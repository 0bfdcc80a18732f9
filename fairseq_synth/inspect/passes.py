"""Forward passes over data: what the attentions compute in them, and the loss."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]  # comes with fairseq

from .checkpoints import Batch, Loaded
from .hooks import Attention, Reading, reading, tokens_of


def progress(items: Iterable[Any], title: str) -> Any:
    """A bar on standard error."""
    return tqdm(list(items), desc=title, leave=True, mininterval=1.0)


def pad_of(loaded: Loaded) -> int:
    """The index of padding."""
    return int((loaded.task.target_dictionary or loaded.task.source_dictionary).pad())


class Sentences:
    """What the attentions of a model compute in a forward pass, sentence by sentence, without padding."""

    def __init__(self, model: nn.Module, pad: int) -> None:
        self.model, self.pad = model, pad

    @torch.no_grad()
    def __call__(self, batch: Batch, read: Callable[[Attention, int, Tensor, bool], None]) -> dict[str, Tensor]:
        """Calls ``read(attention, sentence, logits (H, T, S), causal)``; returns the tokens of each stack."""
        readings: list[Reading] = []
        with tokens_of(self.model) as tokens, reading(self.model, readings.append):
            self.model(**batch["net_input"])
        lengths = {name: found.ne(self.pad).sum(dim=1).tolist() for name, found in tokens.items()}
        for attention, logits, causal in readings:
            keys = lengths["encoder" if attention.kind == "cross" else attention.stack]
            for i, (rows, columns) in enumerate(zip(lengths[attention.stack], keys)):
                read(attention, i, logits[i, :, :rows, :columns], causal)
        return tokens


def criterion_of(loaded: Loaded) -> Any:
    """The training's loss."""
    return loaded.task.build_criterion(loaded.cfg.criterion).eval()


@torch.no_grad()
def loss(loaded: Loaded, sample: list[Batch]) -> float:
    """The loss on the data in bits, as fairseq-validate says it: without label smoothing, by `denominator`."""
    criterion, total, size = criterion_of(loaded), 0.0, 0
    for batch in sample:
        value, number, log = criterion(loaded.model, batch)
        total += float(log.get("nll_loss", value))
        size += denominator(number, log)
    return total / size / math.log(2)


def denominator(sample_size: Any, log: dict[str, Any]) -> int:
    """What fairseq divides a batch's loss by: tokens, masked tokens or examples.

    Args:
        sample_size, log: what a criterion returns beside the loss.
    """
    return int(log["ntokens"] if "nll_loss" in log else sample_size)
