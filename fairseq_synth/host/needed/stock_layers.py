"""Makes fairseq's own encoder usable at inference: the stock Transformer is the baseline of every comparison."""

from typing import Any

import torch.nn as nn

from ..layers import HostLayer, has_fast_path
from ..repairs import repair


@repair(
    "__init__",
    HostLayer,
    symptom='A stock model translates nothing: "Mask Type should be defined"',
    versions="0.12.2 with torch >= 1.13; its issue #4899",
    where=lambda: has_fast_path(HostLayer),
)
def leave_the_fast_path(original_init: Any, self: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Replaces the ``__init__`` of fairseq's encoder layer with one that turns the layer's fast path off.

    Layers take the fast path at inference. It accepts padding only on the right, but sources are padded on the left.
    """
    original_init(self, *args, **kwargs)
    self.can_use_fastpath = False  # type: ignore[assignment]
