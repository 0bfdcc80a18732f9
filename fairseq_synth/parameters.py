"""What the functions of `synthesizers` do with their parameters: sizes, initial values, positions."""

import math
from typing import List, Tuple

import torch
import torch.nn as nn
from torch import Tensor

from .errors import SynthesizerError


def factorize(length: int) -> Tuple[int, int]:
    """``(a, b)`` with ``a b = length`` and a the largest divisor up to the square root.

    Raises:
        SynthesizerError: no divisor but 1, so that nothing is factorized.
    """
    for a in range(math.isqrt(length), 1, -1):
        if length % a == 0:
            return a, length // a
    raise SynthesizerError(
        f"--synth-max-length {length}: factorized_dense needs a product a*b with a, b > 1; "
        f"take {max(4, length + 1)}, for example"
    )


def positions(x: Tensor, dim: int, start: int, count: int) -> Tensor:
    """The entries along a dimension of l for positions ``start .. start + count - 1``: position p has entry p mod l.

    This is the paper's way to sentences beyond l, "tile to the maximum sequence length". Within l it is a view.
    """
    length = x.size(dim)
    if start == 0 and count == length:
        return x  # the gradient of a slice is a copy
    start = start % length
    if start + count <= length:
        return x.narrow(dim, start, count)
    pieces: List[Tensor] = []
    while count > 0:
        piece = x.narrow(dim, start, min(count, length - start))
        pieces.append(piece)
        count -= piece.size(dim)
        start = 0
    return torch.cat(pieces, dim=dim)


def glorot_uniform_(weight: Tensor) -> Tensor:
    """Glorot-uniform for each head's matrix of a (H, m, n) tensor: U(-s, s) with s = sqrt(6 / (m + n)); returns it."""
    bound = math.sqrt(6.0 / (weight.size(1) + weight.size(2)))
    return nn.init.uniform_(weight, -bound, bound)
