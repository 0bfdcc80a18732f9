"""Makes fairseq's own encoder usable at inference: the stock Transformer is the baseline of every comparison."""

from typing import Any

import torch.nn as nn

from ..layers import HostLayer, has_fast_path
from ..repairs import repair


@repair("__init__", HostLayer, where=lambda: has_fast_path(HostLayer))
def leave_the_fast_path(init: Any, self: nn.Module, *args: Any, **kwargs: Any) -> None:
    """A stock model translates nothing: "Mask Type should be defined" (0.12.2 with torch >= 1.13; its issue #4899).

    At inference the encoder layers take a fast path that accepts padding only on the right, but sources are padded on
    the left.
    """
    init(self, *args, **kwargs)
    self.can_use_fastpath = False  # type: ignore[assignment]
