"""The logits of each function for a sentence of a few words, for a picture."""

from collections.abc import Sequence

import torch

from fairseq_synth.positions import Inputs
from fairseq_synth.synthesizers import Mixture

VECTOR_WIDTH = 16  # how many numbers the vector of a word has


def compute_logits(name: str, words: Sequence[str]) -> list[list[float]]:
    """Returns S of a function before training, rounded: a row and a column for each word.

    It is computed in fp64, so that the rounded values do not depend on the processor.
    """
    length = len(words)
    torch.manual_seed(1)
    function = Mixture((name,), mixture="convex", num_heads=1, head_dim=VECTOR_WIDTH, max_length=length, rank=2)
    function.reset_parameters()
    function = function.double()
    with torch.no_grad():
        (logits,) = function(make_inputs(words))
    # A function whose logits are the same for all sentences, heads or rows may return 1 in place of their number.
    all_logits = logits.total(length).expand(1, 1, length, length)  # (1 sentence, 1 head, length, length)
    matrix = all_logits[0, 0]
    return [[round(value, 3) for value in row] for row in matrix.tolist()]


def make_inputs(words: Sequence[str]) -> Inputs:
    """Returns random vectors for words, with their queries and keys: the same for all functions."""
    length = len(words)
    torch.manual_seed(4)
    vectors = {word: torch.randn(VECTOR_WIDTH, dtype=torch.double) for word in sorted(set(words))}
    projections = torch.randn(2, VECTOR_WIDTH, VECTOR_WIDTH, dtype=torch.double) / VECTOR_WIDTH**0.5
    query_projection, key_projection = projections.unbind()
    x = torch.stack([vectors[word] for word in words])  # (length, width)
    queries = x @ query_projection
    keys = x @ key_projection
    return Inputs(
        x=x.unsqueeze(1),  # (length, 1 sentence, width)
        q=queries[None, None],  # (1 sentence, 1 head, length, width)
        k=keys[None, None],
        start=0,
        src_len=length,
    )
