"""fairseq's encoder layer: in a form whose self-attention can be replaced, and a repair of its own class."""

from types import SimpleNamespace
from typing import Any

import fairseq.modules.transformer_layer
import torch
import torch.nn as nn

from .repairs import repair

# of weights, in every encoder layer of fairseq 0.12.2 and of its checkpoints
FAST_PATH_COPIES = [f"{name}_{part}" for name in ("in_proj", "out_proj", "fc1", "fc2") for part in ("weight", "bias")]


def has_fast_path(layer_class: type) -> bool:
    """Whether this is the encoder layer of fairseq 0.12.2."""
    return "_load_from_state_dict" in vars(layer_class)


def without_fast_path(layer_class: type[nn.Module]) -> type[nn.Module]:
    """fairseq 0.12.2's encoder layer computes its own dot-product attention at inference (BetterTransformer).

    It bypasses the layer's ``self_attn`` once a checkpoint is loaded, keeps eight dead copies of the weights
    for that, and cannot be built around an attention without q_proj. This is the same layer without it.
    """
    if not has_fast_path(layer_class):
        return layer_class

    class TransformerEncoderLayerWithoutFastPath(layer_class):  # type: ignore[misc, valid-type]
        def __init__(self, cfg: Any, return_fc: bool = False) -> None:
            build_self_attention = self.build_self_attention
            # what the host's copies are shaped after
            size = {"weight": torch.empty(0, 0), "bias": torch.empty(0)}
            stand_in = SimpleNamespace(q_proj=SimpleNamespace(**size), out_proj=SimpleNamespace(**size))
            object.__setattr__(self, "build_self_attention", lambda embed_dim, cfg: stand_in)
            super().__init__(cfg, return_fc=return_fc)
            for name in FAST_PATH_COPIES:
                delattr(self, name)
                setattr(self, name, torch.empty(0))  # no parameter; TorchScript looks for the name
            del self.build_self_attention, self.self_attn  # type: ignore[has-type]
            self.self_attn = build_self_attention(self.embed_dim, cfg)
            self.can_use_fastpath = False

    return TransformerEncoderLayerWithoutFastPath


HostLayer: Any = fairseq.modules.transformer_layer.TransformerEncoderLayerBase
TransformerEncoderLayerBase: Any = without_fast_path(HostLayer)


@repair("__init__", HostLayer, where=lambda: has_fast_path(HostLayer))
def leave_the_fast_path(init: Any, self: nn.Module, *args: Any, **kwargs: Any) -> None:
    """A stock model translates nothing: "Mask Type should be defined" (0.12.2 with torch >= 1.13; its issue #4899).

    The encoder layers' fast path at inference takes padding on the right alone, and sources are padded on the left.
    """
    init(self, *args, **kwargs)
    self.can_use_fastpath = False  # type: ignore[assignment]
