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


HostLayer: Any = fairseq.modules.transformer_layer.TransformerEncoderLayerBase


class EncoderLayerWithAttention(HostLayer):
    """fairseq's encoder layer. A subclass chooses its self-attention by overriding `build_own_attention`."""

    def build_own_attention(self, embed_dim: int, cfg: Any) -> nn.Module:
        """Returns the self-attention of the layer; here it is fairseq's own."""
        attention: nn.Module = super().build_self_attention(embed_dim, cfg)
        return attention

    def build_self_attention(self, embed_dim: int, cfg: Any) -> Any:
        """Returns the self-attention of the layer; fairseq's constructor calls this."""
        return self.build_own_attention(embed_dim, cfg)


class EncoderLayerWithoutFastPath(EncoderLayerWithAttention):
    """The encoder layer of fairseq 0.12.2 without its fast path.

    The fast path (BetterTransformer) is used at inference, once a checkpoint is loaded. It always computes dot-product
    attention and never calls the layer's ``self_attn``, which is another attention in a Synthesizer.
    """

    def __init__(self, cfg: Any, return_fc: bool = False) -> None:
        """Builds fairseq's layer with a placeholder of the attention, and then puts the attention in its place.

        For the fast path, fairseq's constructor copies the weights of the attention's projections, such as
        ``self_attn.q_proj``. The attention of a Synthesizer may not have these projections, but the placeholder has.
        """
        super().__init__(cfg, return_fc=return_fc)  # This calls `build_self_attention`, which returns the placeholder.
        for name in FAST_PATH_COPIES:
            delattr(self, name)
        self.self_attn = self.build_own_attention(self.embed_dim, cfg)
        self.can_use_fastpath = False

    def build_self_attention(self, embed_dim: int, cfg: Any) -> SimpleNamespace:
        """Returns the placeholder. It has only the weights that fairseq's constructor reads, all empty."""
        empty_projection = SimpleNamespace(weight=torch.empty(0, 0), bias=torch.empty(0))
        return SimpleNamespace(q_proj=empty_projection, out_proj=empty_projection)


TransformerEncoderLayerBase: Any = (
    EncoderLayerWithoutFastPath if has_fast_path(HostLayer) else EncoderLayerWithAttention
)
