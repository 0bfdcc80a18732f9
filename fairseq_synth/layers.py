"""Stacks of fairseq's layers with another self-attention: layers, encoder, decoder, for every kind of model.

An encoder or decoder checks lengths and aligns padded sentences, once, so that the layers see every sentence from
position 0 on.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerConfig, TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.fairseq_dropout import FairseqDropout
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from torch import Tensor

from .attention import SyntheticAttention
from .config import limit_of
from .heads import HeadGroup, build_synthesizer
from .host.layers import FAST_PATH_COPIES, TransformerEncoderLayerBase
from .lengths import Limit
from .masks import align, aligned_columns, causal_mask, restore


def build_attention(
    cfg: TransformerConfig, side: str, groups: Sequence[HeadGroup], quant_noise: float, block_size: int
) -> SyntheticAttention:
    """The self-attention of one layer; `side` is ``encoder`` or ``decoder``, `groups` the functions of its heads."""
    embed_dim, heads = getattr(cfg, side).embed_dim, getattr(cfg, side).attention_heads
    synthesizer = build_synthesizer(
        groups, cfg.synth_mixture, embed_dim // heads, cfg.synth_max_length, cfg.synth_rank, cfg.synth_beyond_length
    )
    return SyntheticAttention(embed_dim, heads, synthesizer, cfg.attention_dropout, quant_noise, block_size)


def wrap_layer(layer: nn.Module, cfg: TransformerConfig) -> nn.Module:
    """Activation checkpointing and sharding, as fairseq wraps its own layers.

    --offload-activations sets --checkpoint-activations, as its help says. fairseq does that for some models only; here
    it is so for every model.
    """
    is_checkpointed = cfg.checkpoint_activations or cfg.offload_activations
    if is_checkpointed:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    return fsdp_wrap(layer, min_num_params=0 if is_checkpointed else cfg.min_params_to_wrap)


def name_dropout(module: nn.Module, host: str) -> None:
    """Gives a layer's or stack's own dropout the name of fairseq's class, for ``--retain-dropout-modules``."""
    for child in module.children():
        if isinstance(child, FairseqDropout):
            child.module_name = host


class EncoderLayer(TransformerEncoderLayerBase):
    """fairseq's encoder layer, whose ``build_self_attention`` a subclass may override."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        name_dropout(self, "TransformerEncoderLayerBase")

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        for name in FAST_PATH_COPIES:
            state_dict.pop(prefix + name, None)
        nn.Module._load_from_state_dict(self, state_dict, prefix, *args)


class SynthesizerEncoderLayer(EncoderLayer):
    """fairseq's encoder layer around a `SyntheticAttention` of heads of the functions `groups`."""

    def __init__(self, cfg: TransformerConfig, groups: Sequence[HeadGroup], return_fc: bool = False) -> None:
        self.groups = tuple(groups)
        super().__init__(cfg, return_fc=return_fc)

    def build_self_attention(self, embed_dim: int, cfg: TransformerConfig) -> SyntheticAttention:
        return build_attention(cfg, "encoder", self.groups, self.quant_noise, self.quant_noise_block_size)


class SynthesizerDecoderLayer(TransformerDecoderLayerBase):
    """fairseq's decoder layer around a `SyntheticAttention` of heads of the functions `groups`."""

    def __init__(self, cfg: TransformerConfig, groups: Sequence[HeadGroup], no_encoder_attn: bool = False) -> None:
        self.groups = tuple(groups)
        super().__init__(cfg, no_encoder_attn)
        name_dropout(self, "TransformerDecoderLayerBase")

    def build_self_attention(
        self, embed_dim: int, cfg: TransformerConfig, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> SyntheticAttention:
        return build_attention(cfg, "decoder", self.groups, self.quant_noise, self.quant_noise_block_size)


class LimitedStack:
    """An encoder or decoder with a longest sentence; among the bases of a class it stands before fairseq's."""

    max_length: int | None
    length_flag: str
    built = 0  # the layers that there are so far

    def set_limit(self, limit: Limit | None) -> None:
        """Sets the longest sentence in tokens, and the flag to name."""
        self.max_length, self.length_flag = limit or (None, "")

    def next_layer(self) -> int:
        """The number of the layer to build; fairseq builds them in their order, and does not say."""
        self.built += 1
        return self.built - 1

    def max_positions(self) -> int:
        """Longest sentence in tokens: fairseq's limit, or `max_length` where that is lower."""
        limits = [super().max_positions(), self.max_length]  # type: ignore[misc]
        return min(limit for limit in limits if limit is not None)

    def check_length(self, tokens: Tensor) -> None:
        """Raises ValueError if a batch (B, T) has more columns than `max_length`."""
        limit = self.max_length
        if limit is not None and tokens.size(1) > limit:
            raise ValueError(
                f"a sentence of {tokens.size(1)} tokens is longer than {self.length_flag} {limit}; shorten it, or train with a larger {self.length_flag}, which must be a "
                "multiple of --required-seq-len-multiple, if that is used. Tokens that the task itself adds, as with "
                "--insert or --encoder-langtok, count too"
            )


class AlignedEncoder(LimitedStack, TransformerEncoderBase):
    """fairseq's encoder. A sentence's first token is position 0 for every layer, however it is padded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        name_dropout(self, "TransformerEncoder")

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        token_embeddings: Tensor | None = None,
    ) -> dict[str, list[Tensor]]:
        """As fairseq's own; left-padded sentences are aligned for the layers and handed back as they came.

        Args:
            src_tokens: (B, T), padded on either side.

        Raises:
            ValueError: T is beyond `max_length`.
        """
        self.check_length(src_tokens)
        padding_mask = src_tokens.eq(self.padding_idx)
        columns = aligned_columns(padding_mask)
        if token_embeddings is not None:
            token_embeddings = align(token_embeddings, columns)
        out = self.forward_scriptable(align(src_tokens, columns), src_lengths, return_all_hiddens, token_embeddings)
        out["encoder_out"] = [restore(x, columns) for x in out["encoder_out"]]
        out["encoder_states"] = [restore(x, columns) for x in out["encoder_states"]]
        out["encoder_embedding"] = [restore(x, columns, batch_first=True) for x in out["encoder_embedding"]]
        if not torch.jit.is_scripting():  # None for each layer, unless they are asked for
            out["fc_results"] = [None if x is None else restore(x, columns) for x in out["fc_results"]]
        out["encoder_padding_mask"] = [padding_mask]
        return out


class SynthesizerEncoder(AlignedEncoder):
    """fairseq's encoder with synthesized self-attention."""

    def __init__(self, cfg: TransformerConfig, dictionary: Any, embed_tokens: nn.Embedding, **kwargs: Any) -> None:
        super().__init__(cfg, dictionary, embed_tokens, **kwargs)
        self.set_limit(limit_of(cfg, cfg.encoder_synthesizer))

    def build_encoder_layer(self, cfg: TransformerConfig) -> nn.Module:
        groups = cfg.encoder_synthesizer[self.next_layer()]
        return wrap_layer(SynthesizerEncoderLayer(cfg, groups, return_fc=self.return_fc), cfg)


class SynthesizerDecoder(LimitedStack, TransformerDecoderBase):
    """fairseq's decoder, with synthesized self-attention and targets aligned as in `AlignedEncoder`."""

    def __init__(
        self,
        cfg: TransformerConfig,
        dictionary: Any,
        embed_tokens: nn.Embedding,
        no_encoder_attn: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(cfg, dictionary, embed_tokens, no_encoder_attn, **kwargs)
        name_dropout(self, "TransformerDecoder")
        self.set_limit(limit_of(cfg, cfg.decoder_synthesizer))
        for i in range(len(self.layers)):  # iteration leaves layers out at random with --decoder-layerdrop
            self.layers[i].self_attn.share_table(self.layers[0].self_attn)

    def build_decoder_layer(self, cfg: TransformerConfig, no_encoder_attn: bool = False) -> nn.Module:
        groups = cfg.decoder_synthesizer[self.next_layer()]
        return wrap_layer(SynthesizerDecoderLayer(cfg, groups, no_encoder_attn), cfg)

    def buffered_future_mask(self, tensor: Tensor) -> Tensor:
        """What fairseq hands to the layers as the causal mask: `causal_mask`, as sentences are aligned."""
        return causal_mask(tensor)

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, list[Tensor]] | None,
        incremental_state: dict[str, dict[str, Tensor | None]] | None = None,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
    ) -> tuple[Tensor, dict[str, list[Tensor | None]]]:
        """As fairseq's own; left-padded targets are aligned for the layers and handed back as they came.

        Args:
            prev_output_tokens: (B, T), padded on either side; in incremental decoding everything so far.

        Raises:
            ValueError: T is beyond ``--synth-max-length``.
        """
        self.check_length(prev_output_tokens)
        columns: Tensor | None = None
        if incremental_state is None:  # else the one new token has its position from the cache
            columns = aligned_columns(prev_output_tokens.eq(self.padding_idx))
        x, extra = self.extract_features_scriptable(
            align(prev_output_tokens, columns),
            encoder_out,
            incremental_state,
            full_context_alignment,
            alignment_layer,
            alignment_heads,
        )
        attn: list[Tensor | None] = []  # B x T x S
        for weights in extra["attn"]:
            attn.append(None if weights is None else restore(weights, columns, batch_first=True))
        states: list[Tensor | None] = []  # T x B x C
        for state in extra["inner_states"]:
            states.append(None if state is None else restore(state, columns))
        return restore(x, columns, batch_first=True), {"attn": attn, "inner_states": states}
