"""Makes fairseq's own encoder usable at inference: the stock Transformer is the baseline of every comparison."""

from collections.abc import Callable
from typing import Any

import torch.nn as nn

from ..layers import HostLayer, has_fast_path
from ..repairs import repair


@repair(
    "__init__",
    HostLayer,
    symptom='Generation with models of fairseq itself fails with "Mask Type should be defined"',
    versions="0.12.2 with torch >= 1.13; its issue #4899",
    is_needed=lambda: has_fast_path(HostLayer),
)
def leave_the_fast_path(original: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Replaces ``TransformerEncoderLayerBase.__init__`` (``original``): switches the layer's fast path off.

    fairseq's encoder layers take the fast path (BetterTransformer) at inference. It accepts padding only on the right,
    but fairseq pads source sentences on the left, so the fast path ends in an error.
    """
    original(self, *args, **kwargs)
    self.can_use_fastpath = False  # type: ignore[assignment]
