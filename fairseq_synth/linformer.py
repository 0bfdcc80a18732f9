"""Linformer (Wang et al. 2020, arXiv 2006.04768), a baseline for encoders: attention to k projected positions."""

import argparse
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from fairseq.dataclass import ChoiceEnum
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.fairseq_dropout import FairseqDropout
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor

from .config import check_attention, config_class, flag, kept_layers
from .errors import SynthesizerError
from .layers import AlignedEncoder, EncoderLayer, wrap_layer
from .lengths import Limit
from .roberta import ROBERTA_FLAGS, STRUCTURE_FLAGS, SynthesizerRoberta, SynthesizerRobertaEncoder
from .synthesizers import glorot_uniform_

SHARING = ("none", "headwise", "key-value", "layerwise")

LINFORMER_FLAGS = [
    flag("linformer_k", int, 64, "number of positions that keys and values are projected to (k in the paper)"),
    flag(
        "linformer_sharing",
        ChoiceEnum(SHARING),
        "layerwise",
        "which projections are one: 'none', those of all heads ('headwise'), also those of keys and values "
        "('key-value'), also those of all layers ('layerwise')",
    ),
]


class LinformerAttention(nn.Module):
    """Multi-head self-attention ``softmax(Q (E K)^T / sqrt(d)) F V`` (eq. 7), E and F of (k, n).

    A sentence of T tokens takes the first T columns of E and F. Keys and values at padding count as 0, so that padding
    leaves no trace in the k projected positions.

    Args:
        embed_dim: width C of the layer; a multiple of `num_heads`.
        num_heads: H.
        max_length: n, the longest sentence.
        k: projected positions.
        sharing: one of `SHARING`; ``layerwise`` is the encoder's to do, and here the same as ``key-value``.
        dropout: probability of dropping an attention weight.
        q_noise: quantization noise on the projections, and its block size `qn_block_size`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        max_length: int,
        k: int,
        sharing: str,
        dropout: float = 0.0,
        q_noise: float = 0.0,
        qn_block_size: int = 8,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout_module = FairseqDropout(dropout, module_name="MultiheadAttention")  # fairseq's name
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            quant_noise(nn.Linear(embed_dim, embed_dim), q_noise, qn_block_size) for _ in range(4)
        )
        heads = num_heads if sharing == "none" else 1
        self.E = nn.Parameter(torch.empty(heads, k, max_length))
        self.F = self.E if sharing in ("key-value", "layerwise") else nn.Parameter(torch.empty_like(self.E))
        for projection in (self.E, self.F):
            glorot_uniform_(projection)  # the paper does not say

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends; the call is fairseq's, of an encoder layer.

        Args:
            query: (T, B, C); `key` and `value` are the same.
            key_padding_mask: (B, T), true at padding.
            attn_mask: None.

        Returns:
            the output (T, B, C), and None: the weights are of projected positions.
        """
        assert attn_mask is None, "attn_mask: projected positions stand for all columns at once"
        length, bsz, width = query.size()
        q, k, v = self.q_proj(query), self.k_proj(query), self.v_proj(query)
        if key_padding_mask is not None:
            padding = key_padding_mask.to(torch.bool).t().unsqueeze(-1)
            k, v = k.masked_fill(padding, 0.0), v.masked_fill(padding, 0.0)
        k = torch.matmul(self.E[:, :, :length], self.split_heads(k))  # (B, H, k, d)
        v = torch.matmul(self.F[:, :, :length], self.split_heads(v))
        is_dropped = self.training or self.dropout_module.apply_during_inference
        dropout = self.dropout_module.p if is_dropped else 0.0
        out = F.scaled_dot_product_attention(self.split_heads(q), k, v, dropout_p=dropout)
        return self.out_proj(out.permute(2, 0, 1, 3).reshape(length, bsz, width)), None

    def split_heads(self, x: Tensor) -> Tensor:
        """(T, B, C) -> (B, H, T, d), without a copy."""
        return x.reshape(x.size(0), x.size(1), self.num_heads, -1).permute(1, 2, 0, 3)


class LinformerEncoderLayer(EncoderLayer):
    """fairseq's encoder layer around a `LinformerAttention`."""

    def build_self_attention(self, embed_dim: int, cfg: TransformerConfig) -> LinformerAttention:
        return LinformerAttention(
            embed_dim,
            cfg.encoder.attention_heads,
            cfg.max_source_positions,
            cfg.linformer_k,
            cfg.linformer_sharing,
            cfg.attention_dropout,
            self.quant_noise,
            self.quant_noise_block_size,
        )


class LinformerEncoder(AlignedEncoder):
    """fairseq's encoder of `LinformerEncoderLayer`; the projections are of all layers if they are shared so."""

    def __init__(self, cfg: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        self.set_limit(Limit(cfg.max_source_positions, "--max-positions"))
        if cfg.linformer_sharing == "layerwise":
            for i in range(len(self.layers)):  # iteration leaves layers out at random with --encoder-layerdrop
                attention = self.layers[i].self_attn
                attention.E = attention.F = self.layers[0].self_attn.E

    def build_encoder_layer(self, cfg: TransformerConfig) -> nn.Module:
        return wrap_layer(LinformerEncoderLayer(cfg, return_fc=self.return_fc), cfg)


class LinformerRobertaEncoder(SynthesizerRobertaEncoder):
    """fairseq's RobertaEncoder around a `LinformerEncoder`."""

    stack = LinformerEncoder


class RobertaLinformer(SynthesizerRoberta):
    """fairseq's ``roberta`` with the self-attention of Linformer."""

    kind = "Linformer"
    stacks = ()
    config = config_class("RobertaLinformerConfig", *LINFORMER_FLAGS, *ROBERTA_FLAGS, *STRUCTURE_FLAGS)
    encoder_class = LinformerRobertaEncoder

    def load_state_dict(self, state_dict: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """As in `SynthesizerRoberta`, and for weights in which projections differ that the model shares."""
        shared: dict[int, str] = {}  # a parameter and the first of its names
        for name, parameter in self.named_parameters(remove_duplicate=False):
            theirs, first = state_dict.get(name), shared.setdefault(id(parameter), name)
            one = state_dict.get(first)
            if name.endswith((".E", ".F")) and not (theirs is None or one is None or torch.equal(theirs, one)):
                raise SynthesizerError(
                    f"--linformer-sharing {self.args.linformer_sharing}: {first} and {name} are one in this model, and "
                    "differ in the checkpoint; give the --linformer-sharing of the training"
                )
        return super().load_state_dict(state_dict, *args, **kwargs)

    @classmethod
    def check_encoder(cls, args: argparse.Namespace) -> Limit | None:
        """Checks the heads, the layers and ``--linformer-k``; the longest input is ``--max-positions``."""
        check_attention(args, "encoder")
        kept_layers(args, "encoder")
        if args.linformer_k < 1:
            raise SynthesizerError(f"--linformer-k {args.linformer_k}: must be at least 1")
        return None
