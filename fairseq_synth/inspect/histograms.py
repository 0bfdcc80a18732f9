"""Makes histograms of the values of each attention, trained and initial."""

import torch
from torch import Tensor

from . import measure
from .subject import Figures, rounded

BINS = 60
OUTLIERS = 0.001  # share of the lowest, and of the highest values, which no histogram's range has to hold
LARGEST_SAMPLE = 1_000_000  # torch's quantiles take at most 16 million values


def add_histograms(
    attention_figures: dict[str, Figures], kind: str, trained: dict[str, Tensor], initial: dict[str, Tensor]
) -> None:
    """Adds histograms of each attention's values, initial and trained, over the same intervals.

    Args:
        attention_figures: {attention: its figures}, which get ``histograms``.
        kind: parameters, logits or weights.
        trained: {attention: values}.
        initial: the same of the initial model, or empty.
    """
    for name, figures in attention_figures.items():
        values = {}
        for state, values_of_attentions in (("trained", trained), ("initial", initial)):
            if name in values_of_attentions and values_of_attentions[name].numel():
                values[state] = values_of_attentions[name]
        if values:
            figures.setdefault("histograms", {})[kind] = make_histogram(kind, values)


def make_histogram(kind: str, values: dict[str, Tensor]) -> Figures:
    """Returns the range, the shares of each interval and the standard deviation of values.

    Args:
        kind: parameters, logits or weights. The range of weights is from 0 to 1; that of the others holds all values
            but the outliers.
        values: {trained or initial: values}.
    """
    low, high = (0.0, 1.0) if kind == "weights" else value_range(list(values.values()))
    shares = {}
    deviation = {}
    for state, state_values in values.items():
        shares[state] = measure.histogram(state_values, low, high, BINS)
        deviation[state] = float(state_values.std(unbiased=False))
    histogram: Figures = rounded({"low": low, "high": high, "shares": shares, "deviation": deviation})
    return histogram


def value_range(tensors: list[Tensor]) -> tuple[float, float]:
    """Returns the range that holds the values of all tensors but their outliers."""
    low = min(quantile(tensor, OUTLIERS) for tensor in tensors)
    high = max(quantile(tensor, 1 - OUTLIERS) for tensor in tensors)
    if low == high:
        return low - 1, high + 1
    return low, high


def quantile(values: Tensor, share: float) -> float:
    """Returns a quantile of the values, or of evenly spaced ones if there are too many."""
    step = values.numel() // LARGEST_SAMPLE + 1
    return float(torch.quantile(values[::step].float(), share))
