"""Provides fairseq's encoder layer in a form whose self-attention can be replaced."""

from types import SimpleNamespace
from typing import Any

import fairseq.modules.transformer_layer
import torch
import torch.nn as nn

# the copies of weights that every encoder layer of fairseq 0.12.2 has for its fast path, and so have its checkpoints
FAST_PATH_COPIES = [
    "in_proj_weight",
    "in_proj_bias",
    "out_proj_weight",
    "out_proj_bias",
    "fc1_weight",
    "fc1_bias",
    "fc2_weight",
    "fc2_bias",
]


def has_fast_path(layer_class: type) -> bool:
    """Returns whether this is the encoder layer of fairseq 0.12.2, which has a fast path for inference."""
    return "_load_from_state_dict" in vars(layer_class)


def without_fast_path(layer_class: type[nn.Module]) -> type[nn.Module]:
    """Returns fairseq's encoder layer without the fast path of 0.12.2, or the class itself if it has none.

    The fast path (BetterTransformer) computes dot-product attention at inference and bypasses the layer's
    ``self_attn`` once a checkpoint is loaded. It keeps eight copies of weights for that, and cannot be built around an
    attention without q_proj.
    """
    if not has_fast_path(layer_class):
        return layer_class

    class TransformerEncoderLayerWithoutFastPath(layer_class):  # type: ignore[misc, valid-type]
        def __init__(self, cfg: Any, return_fc: bool = False) -> None:
            build_self_attention = self.build_self_attention
            # fairseq's __init__ shapes its copies after the weights of the attention: give it empty ones
            empty_projection = SimpleNamespace(weight=torch.empty(0, 0), bias=torch.empty(0))
            stand_in = SimpleNamespace(q_proj=empty_projection, out_proj=empty_projection)
            object.__setattr__(self, "build_self_attention", lambda embed_dim, cfg: stand_in)
            super().__init__(cfg, return_fc=return_fc)
            for name in FAST_PATH_COPIES:
                delattr(self, name)
            del self.build_self_attention
            del self.self_attn  # type: ignore[has-type]
            self.self_attn = build_self_attention(self.embed_dim, cfg)
            self.can_use_fastpath = False

    return TransformerEncoderLayerWithoutFastPath


HostLayer: Any = fairseq.modules.transformer_layer.TransformerEncoderLayerBase
TransformerEncoderLayerBase: Any = without_fast_path(HostLayer)
