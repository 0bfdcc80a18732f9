"""Reduces the results of an inspection to those that docs/analysis.md shows, which are small enough for results/."""

from typing import Any

from .inspection import Results, round_floats

CORNER = 16  # rows and columns of a matrix that are kept


def summarise(results: Results) -> Results:
    """Returns those results of an inspection with data that docs/analysis.md shows.

    Left out are the weights of single sentences, the histograms of parameters, and of the checkpoint's settings all
    but the number of updates. The other histograms get half as many intervals, and matrices are cut to their corner.
    """
    summary = {key: value for key, value in results.items() if key not in ("checkpoint", "sentences")}
    summary["attentions"] = {name: summarise_attention(value) for name, value in results["attentions"].items()}
    summary["updates"] = results["checkpoint"]["updates"]
    return summary


def summarise_attention(results: Results) -> Results:
    """Returns those results of one attention that docs/analysis.md shows.

    The histograms become smaller (`summarise_histograms`). The mean attention weights, ``pattern``, are cut to their
    first rows and columns. Those of a cross-attention are left out.
    """
    summary = {key: value for key, value in results.items() if key != "pattern"}
    summary["histograms"] = summarise_histograms(results.get("histograms", {}))
    is_cross_attention = results["group"] == "decoder.cross"
    if not is_cross_attention:
        matrices_of_heads = results.get("pattern", [])
        summary["pattern"] = [cut_to_corner(matrix) for matrix in matrices_of_heads]
    return summary


def summarise_histograms(histograms: Results) -> Results:
    """Returns the histograms of logits and of weights with half as many intervals. That of parameters is left out.

    Args:
        histograms: {``parameters``, ``logits`` or ``weights``: the histogram of these values}.
    """
    summary = {}
    for kind in ("logits", "weights"):
        if histograms.get(kind):
            summary[kind] = halve_intervals(histograms[kind])
    return summary


def halve_intervals(histogram: Results) -> Results:
    """Returns a histogram with half as many intervals: each is made of two neighbouring ones."""
    shares = {}
    for state, values in histogram["shares"].items():
        pairs = zip(values[::2], values[1::2])
        shares[state] = round_floats([left + right for left, right in pairs], digits=3)
    return {**histogram, "shares": shares}


def cut_to_corner(matrix: list[list[Any]]) -> list[list[Any]]:
    """Returns the first `CORNER` rows and columns of a matrix."""
    return [row[:CORNER] for row in matrix[:CORNER]]
