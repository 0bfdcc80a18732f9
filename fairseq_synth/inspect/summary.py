"""The figures that docs/analysis.md shows, which are few enough to be kept in results/."""

from typing import Any

from .subject import Figures, rounded

CORNER = 16  # rows and columns of a pattern


def summarise(figures: Figures) -> Figures:
    """Returns what docs/analysis.md shows of the figures of an inspection with data.

    Histograms have half as many intervals, patterns of self-attention are cut to their corner, and parameters and
    single sentences are left out.
    """
    kept = {key: value for key, value in figures.items() if key not in ("checkpoint", "sentences")}
    kept["attentions"] = {name: summarise_attention(value) for name, value in figures["attentions"].items()}
    kept["updates"] = figures["checkpoint"]["updates"]
    return kept


def summarise_attention(figures: Figures) -> Figures:
    """Returns what is kept of the figures of one attention."""
    kept = dict(figures)
    pattern = kept.pop("pattern", [])
    kept["histograms"] = {}
    for kind in ("logits", "weights"):
        histogram = figures.get("histograms", {}).get(kind)
        if histogram:
            kept["histograms"][kind] = halve_intervals(histogram)
    if figures["group"] != "decoder.cross":
        kept["pattern"] = [cut_to_corner(head) for head in pattern]
    return kept


def halve_intervals(histogram: Figures) -> Figures:
    """Returns a histogram in which every two neighbouring intervals are one."""
    shares = {}
    for state, values in histogram["shares"].items():
        pairs = zip(values[::2], values[1::2])
        shares[state] = rounded([left + right for left, right in pairs], digits=3)
    return {**histogram, "shares": shares}


def cut_to_corner(matrix: list[list[Any]]) -> list[list[Any]]:
    """Returns the first rows and columns of a matrix."""
    return [row[:CORNER] for row in matrix[:CORNER]]
