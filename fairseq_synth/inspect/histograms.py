"""Makes histograms of the values of each attention, before and after the training."""

import torch
from torch import Tensor

from . import measure
from .inspection import Results, round_floats

BINS = 60
OUTLIERS = 0.001  # share of the lowest, and of the highest values, which no histogram's range has to hold
LARGEST_SAMPLE = 1_000_000  # torch's quantiles take at most 16 million values


def add_histograms(
    attention_results: dict[str, Results], kind: str, trained: dict[str, Tensor], initial: dict[str, Tensor]
) -> None:
    """Adds a histogram of values of one kind to the results of each attention.

    Args:
        attention_results: {attention: its results}; the histogram is added under ``histograms`` and the kind.
        kind: what the values are: ``parameters``, ``logits`` or ``weights``.
        trained: {attention: values of the trained model}.
        initial: {attention: values of the model before its training}; empty if these are not known.
    """
    for name, results in attention_results.items():
        values_by_state = {}
        if has_values(trained, name):
            values_by_state["trained"] = trained[name]
        if has_values(initial, name):
            values_by_state["initial"] = initial[name]
        if values_by_state:
            histograms = results.setdefault("histograms", {})
            histograms[kind] = make_histogram(kind, values_by_state)


def has_values(values: dict[str, Tensor], name: str) -> bool:
    """Returns whether {attention: values} has at least one value of an attention."""
    return name in values and values[name].numel() > 0


def make_histogram(kind: str, values_by_state: dict[str, Tensor]) -> Results:
    """Returns histograms of the trained and the initial values over the same intervals, as values for the JSON file.

    Args:
        kind: what the values are: ``parameters``, ``logits`` or ``weights``.
        values_by_state: {``trained`` or ``initial``: values}, with one state or both.

    Returns:
        ``low`` and ``high``, the range of the intervals; ``shares``, {state: the share of the values in each interval};
        and ``deviation``, {state: the standard deviation}. The range of weights is from 0 to 1, that of others is
        fitted to them.
    """
    if kind == "weights":
        low, high = 0.0, 1.0
    else:
        low, high = find_range(list(values_by_state.values()))
    shares = {}
    deviation = {}
    for state, values in values_by_state.items():
        shares[state] = measure.histogram(values, low, high, BINS)
        deviation[state] = float(values.std(unbiased=False))
    histogram: Results = round_floats({"low": low, "high": high, "shares": shares, "deviation": deviation})
    return histogram


def find_range(tensors: list[Tensor]) -> tuple[float, float]:
    """Returns the lowest and the highest value of several tensors, without the outliers at both ends of each."""
    low = min(quantile(tensor, OUTLIERS) for tensor in tensors)
    high = max(quantile(tensor, 1 - OUTLIERS) for tensor in tensors)
    if low == high:
        return low - 1, high + 1
    return low, high


def quantile(values: Tensor, share: float) -> float:
    """Returns the value below which a share of the values lies.

    If there are more than `LARGEST_SAMPLE` values, evenly spaced ones are taken.
    """
    step = values.numel() // LARGEST_SAMPLE + 1
    return float(torch.quantile(values[::step].float(), share))
