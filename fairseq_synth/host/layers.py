"""Provides fairseq's encoder layer in a form whose self-attention can be replaced."""

from types import SimpleNamespace
from typing import Any

import fairseq.modules.transformer_layer
import torch
import torch.nn as nn

# In these attributes, an encoder layer of fairseq 0.12.2 keeps a second copy of weights for its fast path. The
# checkpoints of this version have them too.
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
    return "_load_from_state_dict" in vars(layer_class)  # a method that only the layer with the fast path defines


def without_fast_path(layer_class: type[nn.Module]) -> type[nn.Module]:
    """Returns fairseq's encoder layer without the fast path of 0.12.2, or the class itself if it has no fast path.

    The fast path (BetterTransformer) is used at inference, once a checkpoint is loaded. It always computes dot-product
    attention and never calls the layer's ``self_attn``, which is another attention in a Synthesizer.

    For the fast path, fairseq's constructor copies weights of projections such as ``self_attn.q_proj``. The attention
    of a Synthesizer may not have these projections. So the layer is built in three steps:

    1. fairseq's constructor runs with a placeholder of the attention, which has empty projections.
    2. The copies are removed.
    3. The attention is built, and takes the place of the placeholder.
    """
    if not has_fast_path(layer_class):
        return layer_class

    class TransformerEncoderLayerWithoutFastPath(layer_class):  # type: ignore[misc, valid-type]
        def __init__(self, cfg: Any, return_fc: bool = False) -> None:
            """Builds the layer without what fairseq 0.12.2 adds to it for the fast path.

            fairseq's constructor makes copies of weights that the attention may not have. So it gets a placeholder of
            the attention, and the attention itself is built once the copies are removed.
            """
            # fairseq's constructor calls `self.build_self_attention`. While the object has an attribute of this name,
            # Python finds it before the method. It is put into __dict__, as nn.Module allows no `self.name = …` before
            # its constructor has run.
            self.__dict__["build_self_attention"] = build_placeholder
            super().__init__(cfg, return_fc=return_fc)
            del self.__dict__["build_self_attention"]  # from here on, the method is found again
            for name in FAST_PATH_COPIES:
                delattr(self, name)
            self.self_attn = self.build_self_attention(self.embed_dim, cfg)
            self.can_use_fastpath = False

    return TransformerEncoderLayerWithoutFastPath


def build_placeholder(embed_dim: int, cfg: Any) -> SimpleNamespace:
    """Returns a placeholder of an attention. It has only the weights that fairseq's constructor reads, all empty."""
    empty_projection = SimpleNamespace(weight=torch.empty(0, 0), bias=torch.empty(0))
    return SimpleNamespace(q_proj=empty_projection, out_proj=empty_projection)


HostLayer: Any = fairseq.modules.transformer_layer.TransformerEncoderLayerBase
TransformerEncoderLayerBase: Any = without_fast_path(HostLayer)
