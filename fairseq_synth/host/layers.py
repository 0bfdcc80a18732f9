"""Provides fairseq's encoder layer in a form whose self-attention can be replaced."""

import contextlib
from collections.abc import Iterator
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

    For the fast path, fairseq's constructor copies eight weights (`FAST_PATH_COPIES`). The shapes of these copies are
    those of projections such as ``self_attn.q_proj``, which a Synthesizer may not have. So the layer without fast path
    first lets the constructor copy the empty weights of a placeholder, then removes the copies, and then builds the
    attention.
    """
    if not has_fast_path(layer_class):
        return layer_class

    class TransformerEncoderLayerWithoutFastPath(layer_class):  # type: ignore[misc, valid-type]
        def __init__(self, cfg: Any, return_fc: bool = False) -> None:
            """Builds the layer without what fairseq 0.12.2 adds to it for the fast path; see `without_fast_path`."""
            with placeholder_attention(self):
                super().__init__(cfg, return_fc=return_fc)
            for name in FAST_PATH_COPIES:
                delattr(self, name)
            self.self_attn = self.build_self_attention(self.embed_dim, cfg)
            self.can_use_fastpath = False

    return TransformerEncoderLayerWithoutFastPath


@contextlib.contextmanager
def placeholder_attention(layer: nn.Module) -> Iterator[None]:
    """Lets ``layer.build_self_attention`` return a placeholder in the body of the with statement.

    The placeholder is no module. It has just the weights that fairseq's constructor reads, and these are empty.
    """
    empty_projection = SimpleNamespace(weight=torch.empty(0, 0), bias=torch.empty(0))
    placeholder = SimpleNamespace(q_proj=empty_projection, out_proj=empty_projection)

    def build_placeholder(embed_dim: int, cfg: Any) -> Any:
        return placeholder

    # An attribute of the object hides the method of its class until it is deleted. The constructor of nn.Module has not
    # run yet, and without it `nn.Module.__setattr__` does not work. So the attribute is set and deleted by `object`.
    object.__setattr__(layer, "build_self_attention", build_placeholder)
    try:
        yield
    finally:
        object.__delattr__(layer, "build_self_attention")


HostLayer: Any = fairseq.modules.transformer_layer.TransformerEncoderLayerBase
TransformerEncoderLayerBase: Any = without_fast_path(HostLayer)
