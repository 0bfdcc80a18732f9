"""The model under inspection: its data, the options, and the figures that are measured so far."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.nn as nn
from torch import Tensor

from .checkpoints import Batch, Loaded

Figures = dict[str, Any]  # plain values, as JSON takes them
INPUTS = ("src_tokens", "prev_output_tokens")  # of a batch, where the model has them
ALL_PARTS = ("attention", "layers", "heads", "words", "lengths")


class Options(NamedTuple):
    """What the command line may change."""

    parts: Sequence[str] = ALL_PARTS
    subset: str = "valid"
    sentences: int | None = None  # None: all
    positions: int = 32  # rows and columns of the patterns shown
    steps: int = 8  # in which heads are removed
    beam: int = 1
    remove_bpe: str | None = "subword_nmt"


class Subject(NamedTuple):
    """A model under inspection. The parts of the inspection add to `figures`."""

    loaded: Loaded
    initial: nn.Module | None  # the model as its training began
    options: Options
    figures: Figures
    order: list[int]  # the sentences of the subset, shortest first; empty without data
    sample: list[Batch]  # the same sentences in batches
    loss: float  # on these sentences, in bits
    pass_seconds: float  # that this loss took

    @property
    def attention_figures(self) -> dict[str, Figures]:
        """The figures of each attention, by its name."""
        figures: dict[str, Figures] = self.figures["attentions"]
        return figures

    def longest_input(self) -> int:
        """Returns the tokens of the longest sentence, of its longer side."""
        sizes = []
        for batch in self.sample:
            for name in INPUTS:
                if name in batch["net_input"]:
                    sizes.append(int(batch["net_input"][name].size(1)))
        return max(sizes)


def rounded(value: Any, digits: int = 4) -> Any:
    """Returns a value in which every float, in lists and dictionaries too, has so many significant digits."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item, digits) for item in value]
    return value


def in_thousandths(weights: Tensor) -> list[Any]:
    """Returns attention weights in thousandths, which are short to write and exact enough for a picture."""
    thousandths: list[Any] = (weights * 1000).round().int().tolist()
    return thousandths
