"""The inspection of one model: the model, its data, the options, and the results that are measured so far."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.nn as nn
from torch import Tensor

from .arguments import PARTS
from .checkpoints import Batch, Loaded, list_inputs
from .results import Results


class Options(NamedTuple):
    """The options of the command line that decide what is measured."""

    parts: Sequence[str] = tuple(PARTS)
    subset: str = "valid"  # the split of the data to read
    sentences: int | None = None  # how many sentences to read at most; None: all
    positions: int = 32  # rows and columns of the mean attention matrices that are kept
    steps: int = 8  # in how many steps heads are removed, from all heads to none
    beam: int = 1
    remove_bpe: str | None = "subword_nmt"  # fairseq's name for the kind of subwords to join before BLEU


class Inspection(NamedTuple):
    """The inspection of one model. Each part of it adds its results to `results`."""

    loaded: Loaded
    initial_model: nn.Module | None  # the model before its training; None: not known
    options: Options
    results: Results
    sentence_indices: list[int]  # which sentences of the data set are read, shortest first; empty without data
    batches: list[Batch]  # the same sentences
    loss: float  # on these sentences, in bits
    pass_seconds: float  # how long the forward passes for this loss took

    @property
    def attention_results(self) -> dict[str, Results]:
        """The results of each attention, by the attention's name, such as ``encoder.self.0``."""
        results: dict[str, Results] = self.results["attentions"]
        return results

    def longest_sentence(self) -> int:
        """Returns the number of tokens of the longest source or target, which is the width of the widest batch."""
        widths = []
        for batch in self.batches:
            for tokens in list_inputs(batch):  # (B, T)
                widths.append(int(tokens.size(1)))
        return max(widths)


def round_floats(value: Any, digits: int = 4) -> Any:
    """Rounds floats to so many significant digits, so that the JSON file stays short.

    Args:
        value: a float, a tensor, or a list, tuple or dictionary of such values; anything else is returned as it is.
        digits: the number of significant digits.

    Returns:
        the same value, with a list in place of each tensor and tuple.
    """
    if isinstance(value, Tensor):
        return round_floats(value.tolist(), digits)
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: round_floats(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [round_floats(item, digits) for item in value]
    return value


def to_thousandths(weights: Tensor) -> list[Any]:
    """Returns attention weights as nested lists of whole thousandths.

    These are short in the JSON file, and exact enough for a picture.
    """
    thousandths: list[Any] = (weights * 1000).round().int().tolist()
    return thousandths
