"""Heads of different kinds in one layer, and what computes the logits of a layer."""

from typing import List, Optional, Sequence

import torch.nn as nn
from torch import Tensor

from .logits import Logits
from .specs import HeadGroup
from .synthesizers import Inputs, LayerSynthesizer, Mixture


class HeadGroups(LayerSynthesizer):
    """Heads of different kinds in one layer: each group of neighbouring heads has a `Mixture` of its own.

    Args:
        mixtures: of the groups, each built for its number of heads.
    """

    def __init__(self, mixtures: Sequence[Mixture]) -> None:
        super().__init__()
        self.groups = nn.ModuleList(mixtures)

    def mixtures(self) -> List[Mixture]:
        return list(self.groups)  # type: ignore[arg-type]

    def forward(self, inputs: Inputs) -> List[Logits]:
        found: List[Logits] = []
        first, first_key = 0, 0
        for group in self.groups:
            heads = group.num_heads  # a ModuleList forgets the type of its modules
            q, k = inputs.q, inputs.k
            group_q: Optional[Tensor] = None
            group_k: Optional[Tensor] = None
            if group.reads_query_key and q is not None and k is not None:
                group_q = q.narrow(1, first_key, heads)  # type: ignore[call-overload]
                group_k = k.narrow(1, first_key, heads)  # type: ignore[call-overload]
                first_key += heads  # type: ignore
            dim = group.head_dim
            x = inputs.x.narrow(2, first * dim, heads * dim)  # type: ignore
            found += group(Inputs(x, group_q, group_k, inputs.start, inputs.src_len))
            first += heads  # type: ignore
        return found


def build_synthesizer(
    groups: Sequence[HeadGroup], mixture: str, head_dim: int, max_length: int, rank: int, beyond_length: str = "refuse"
) -> LayerSynthesizer:
    """What computes the logits of a layer.

    Args:
        groups: as `parse_heads` returns them.
        mixture, head_dim, max_length, rank, beyond_length: as in `Mixture`.
    """
    mixtures = [Mixture(names, mixture, heads, head_dim, max_length, rank, beyond_length) for heads, names in groups]
    return mixtures[0] if len(groups) == 1 else HeadGroups(mixtures)
