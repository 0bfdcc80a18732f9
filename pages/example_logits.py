"""The logits of each function for a sentence of a few words, for a picture."""

from collections.abc import Sequence

import torch

from fairseq_synth.positions import Inputs
from fairseq_synth.synthesizers import Mixture

VECTOR_WIDTH = 16  # how many numbers the vector of a word has
SEED_OF_PARAMETERS = 1
SEED_OF_VECTORS = 4


def compute_logits(name: str, words: Sequence[str]) -> list[list[float]]:
    """Returns the logits S of an attention function before training: a row and a column for each word.

    The parameters are random, the same in every call. S is computed in fp64 and rounded, so that it does not depend on
    the processor.
    """
    length = len(words)
    function = make_function(name, length)
    with torch.no_grad():
        # A function returns the logits of each group of its heads. Here, the only head is the only group.
        (logits_of_group,) = function(make_inputs(words))
    logits = logits_of_group.total(length)  # (1 sentence, 1 head, rows, length), as one tensor
    only_head = logits[0, 0]  # (rows, length)
    # Some functions have the same logits for all words, and return only 1 row of them. `expand` repeats the row.
    matrix = only_head.expand(length, length)
    return [[round(value, 3) for value in row] for row in matrix.tolist()]


def make_function(name: str, length: int) -> Mixture:
    """Returns an attention function in fp64 with random parameters, the same in every call.

    It is a mixture of a single function, and has a single head. A factorized function has the rank 2.

    Args:
        name: the function, such as "random".
        length: the largest number of words that it can be used for.
    """
    torch.manual_seed(SEED_OF_PARAMETERS)
    function = Mixture((name,), mixture="convex", num_heads=1, head_dim=VECTOR_WIDTH, max_length=length, rank=2)
    function.reset_parameters()
    return function.double()


def make_inputs(words: Sequence[str]) -> Inputs:
    """Returns random vectors for the words of a sentence, with their queries and keys: the same in every call.

    Equal words have equal vectors. There is 1 sentence of `length` words, and 1 head. So the vectors are
    (length, sentences, width), and queries and keys are (sentences, heads, length, width).
    """
    length = len(words)
    torch.manual_seed(SEED_OF_VECTORS)
    different_words = sorted(set(words))  # sorted, as the order of a set is another one in each process
    vector_by_word = {word: torch.randn(VECTOR_WIDTH, dtype=torch.double) for word in different_words}
    projections = torch.randn(2, VECTOR_WIDTH, VECTOR_WIDTH, dtype=torch.double) / VECTOR_WIDTH**0.5
    query_projection, key_projection = projections.unbind()
    vectors = torch.stack([vector_by_word[word] for word in words])  # (length, width)
    queries = vectors @ query_projection
    keys = vectors @ key_projection
    return Inputs(
        x=vectors.view(length, 1, VECTOR_WIDTH),
        q=queries.view(1, 1, length, VECTOR_WIDTH),
        k=keys.view(1, 1, length, VECTOR_WIDTH),
        start=0,  # the position of the first word that attends
        src_len=length,  # the number of words that are attended to
    )
