"""fairseq's layers, encoder and decoder with synthesized self-attention, for every kind of model.

An encoder or decoder checks the lengths of its sentences and aligns padded ones, once. Its layers then see every
sentence from position 0 on.
"""

from collections.abc import Sequence
from typing import Any

import torch.nn as nn
from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerConfig, TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.fairseq_dropout import FairseqDropout
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from torch import Tensor

from .attention import SyntheticAttention
from .config import stack_limit
from .heads import HeadGroup, build_synthesizer
from .host.layers import FAST_PATH_COPIES, TransformerEncoderLayerBase
from .lengths import Limit
from .masks import align, aligned_columns, causal_mask, restore


def build_attention(
    cfg: TransformerConfig, side: str, groups: Sequence[HeadGroup], quant_noise: float, block_size: int
) -> SyntheticAttention:
    """Returns the self-attention of one layer, at the sizes in the config.

    Args:
        cfg: The config of the model.
        side: ``encoder`` or ``decoder``, which says which sizes in the config to take.
        groups: The heads of the layer and their functions.
        quant_noise, block_size: Quantization noise on the projections, and its block size.
    """
    embed_dim = getattr(cfg, side).embed_dim
    num_heads = getattr(cfg, side).attention_heads
    synthesizer = build_synthesizer(
        groups,
        mixture=cfg.synth_mixture,
        head_dim=embed_dim // num_heads,
        max_length=cfg.synth_max_length,
        rank=cfg.synth_rank,
        beyond_length=cfg.synth_beyond_length,
    )
    return SyntheticAttention(
        embed_dim,
        num_heads,
        synthesizer,
        dropout=cfg.attention_dropout,
        q_noise=quant_noise,
        qn_block_size=block_size,
    )


def wrap_layer(layer: nn.Module, cfg: TransformerConfig) -> nn.Module:
    """Returns the layer wrapped for activation checkpointing and sharding, as fairseq wraps its own layers.

    ``--offload-activations`` implies ``--checkpoint-activations``, as its help says, but in fairseq only for some
    models. Here, it does for all models.
    """
    is_checkpointed = cfg.checkpoint_activations or cfg.offload_activations
    if is_checkpointed:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    min_num_params = 0 if is_checkpointed else cfg.min_params_to_wrap
    return fsdp_wrap(layer, min_num_params=min_num_params)


def name_dropout(module: nn.Module, fairseq_class: str) -> None:
    """Gives the dropout of a module the name by which ``--retain-dropout-modules`` looks for it.

    Args:
        module: A layer, an encoder or a decoder. Only its own dropout is changed, and not that of its layers.
        fairseq_class: The name of the class of fairseq that the module replaces.
    """
    for child in module.children():
        if isinstance(child, FairseqDropout):
            child.module_name = fairseq_class


class EncoderLayer(TransformerEncoderLayerBase):
    """fairseq's encoder layer, in a form whose `build_own_attention` a subclass may override."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        name_dropout(self, "TransformerEncoderLayerBase")

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Loads a checkpoint without the copies of weights that fairseq 0.12.2 stores for its fast path.

        This layer does not take the fast path.
        """
        for name in FAST_PATH_COPIES:
            state_dict.pop(prefix + name, None)
        nn.Module._load_from_state_dict(self, state_dict, prefix, *args)


class SynthesizerEncoderLayer(EncoderLayer):
    """fairseq's encoder layer around a `SyntheticAttention`; `groups` are its heads and their functions."""

    def __init__(self, cfg: TransformerConfig, groups: Sequence[HeadGroup], return_fc: bool = False) -> None:
        self.groups = tuple(groups)
        super().__init__(cfg, return_fc=return_fc)

    def build_own_attention(self, embed_dim: int, cfg: TransformerConfig) -> SyntheticAttention:
        return build_attention(cfg, "encoder", self.groups, self.quant_noise, self.quant_noise_block_size)


class SynthesizerDecoderLayer(TransformerDecoderLayerBase):
    """fairseq's decoder layer around a `SyntheticAttention`; `groups` are its heads and their functions."""

    def __init__(self, cfg: TransformerConfig, groups: Sequence[HeadGroup], no_encoder_attn: bool = False) -> None:
        self.groups = tuple(groups)
        super().__init__(cfg, no_encoder_attn)
        name_dropout(self, "TransformerDecoderLayerBase")

    def build_self_attention(
        self, embed_dim: int, cfg: TransformerConfig, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> SyntheticAttention:
        return build_attention(cfg, "decoder", self.groups, self.quant_noise, self.quant_noise_block_size)


class LimitedStack:
    """A stack of layers, which is an encoder or a decoder, that takes sentences up to a certain length.

    Among the bases of a class it stands before fairseq's encoder or decoder.
    """

    max_length: int | None  # the longest sentence in tokens; None: no limit
    length_flag: str  # the flag that sets the limit
    num_built_layers = 0

    def set_limit(self, limit: Limit | None) -> None:
        """Sets `max_length` and `length_flag`; None means that sentences may have any length."""
        if limit is None:
            self.max_length = None
            self.length_flag = ""
        else:
            self.max_length = limit.tokens
            self.length_flag = limit.flag

    def count_layer(self) -> int:
        """Returns 0 when it is called for the first time, then 1, and so on: the index of the layer that is built now.

        fairseq builds the layers in their order, but does not say which layer it builds.
        """
        index = self.num_built_layers
        self.num_built_layers += 1
        return index

    def max_positions(self) -> int:
        """Returns the longest sentence in tokens: fairseq's limit, or `max_length` if that is lower."""
        fairseq_limit: int = super().max_positions()  # type: ignore[misc]
        if self.max_length is None:
            return fairseq_limit
        return min(fairseq_limit, self.max_length)

    def check_length(self, tokens: Tensor) -> None:
        """Raises ValueError if a batch (B, T) has more columns than `max_length`."""
        if self.max_length is not None and tokens.shape[1] > self.max_length:
            raise ValueError(
                f"a sentence of {tokens.shape[1]} tokens is longer than {self.length_flag} {self.max_length}; shorten "
                f"it, or train with a larger {self.length_flag}, which must be a multiple of "
                "--required-seq-len-multiple, if that is used. Tokens that the task itself adds, as with --insert or "
                "--encoder-langtok, count too"
            )


def restore_all(
    results: Sequence[Tensor | None], columns: Tensor | None, batch_first: bool = False
) -> list[Tensor | None]:
    """Returns the results after moving each token back to the column that it had before `align`.

    Args:
        results: The results, (T, B, C) each, or (B, T, C) if `batch_first`. fairseq has None for a result that is not
            asked for, which stays None.
        columns: The column to which `align` has moved each token, (B, T); None if it has moved nothing.
        batch_first: Whether the sentences are the first dimension of the results.
    """
    restored_results: list[Tensor | None] = []
    for result in results:
        if result is None:
            restored_results.append(None)
        else:
            restored_results.append(restore(result, columns, batch_first))
    return restored_results


class AlignedEncoder(LimitedStack, TransformerEncoderBase):
    """fairseq's encoder, in which the first token of a sentence has position 0 in every layer, however it is padded.

    For this, sentences that are padded on the left are moved to the left (`masks.align`) before the first layer, and
    back behind the last one (`masks.restore`).
    """

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
        """Encodes sentences; arguments and result are those of fairseq's encoder.

        While the layers compute, all padding is after the tokens of its sentence. In the result, each token is in the
        column that it has in `src_tokens`.

        Args:
            src_tokens: (B, T), padded on either side.
            src_lengths: Number of tokens in each sentence, which does not change when they move.
            return_all_hiddens: Whether to return the output of every layer too.
            token_embeddings: Embeddings to use in place of those of `src_tokens`, (B, T, C).

        Raises:
            ValueError: T is above `max_length`.
        """
        self.check_length(src_tokens)
        padding_mask = src_tokens.eq(self.padding_idx)
        # The column to which each token moves; None if nothing moves.
        columns = aligned_columns(padding_mask)
        aligned_tokens = align(src_tokens, columns)
        aligned_embeddings = None
        if token_embeddings is not None:
            aligned_embeddings = align(token_embeddings, columns)
        # fairseq's encoder, which computes the padding mask from the aligned tokens.
        out = self.forward_scriptable(aligned_tokens, src_lengths, return_all_hiddens, aligned_embeddings)
        # The tokens of all results move back.
        out["encoder_out"] = restore_all(out["encoder_out"], columns)  # (T, B, C)
        out["encoder_states"] = restore_all(out["encoder_states"], columns)  # (T, B, C) for each layer
        out["fc_results"] = restore_all(out["fc_results"], columns)  # (T, B, C) for each layer
        out["encoder_embedding"] = restore_all(out["encoder_embedding"], columns, batch_first=True)  # (B, T, C)
        out["encoder_padding_mask"] = [padding_mask]  # (B, T)
        return out


class SynthesizerEncoder(AlignedEncoder):
    """fairseq's encoder with synthesized self-attention."""

    def __init__(self, cfg: TransformerConfig, dictionary: Any, embed_tokens: nn.Embedding, **kwargs: Any) -> None:
        super().__init__(cfg, dictionary, embed_tokens, **kwargs)
        self.set_limit(stack_limit(cfg, cfg.encoder_head_groups))

    def build_encoder_layer(self, cfg: TransformerConfig) -> nn.Module:
        groups = cfg.encoder_head_groups[self.count_layer()]
        return wrap_layer(SynthesizerEncoderLayer(cfg, groups, return_fc=self.return_fc), cfg)


class SynthesizerDecoder(LimitedStack, TransformerDecoderBase):
    """fairseq's decoder with synthesized self-attention.

    As in `AlignedEncoder`, the first token of a sentence has position 0 in every layer, however it is padded.
    """

    def __init__(
        self,
        cfg: TransformerConfig,
        dictionary: Any,
        embed_tokens: nn.Embedding,
        no_encoder_attn: bool = False,
        **kwargs: Any,
    ) -> None:
        """Builds the decoder with its layers; arguments are those of fairseq's decoder."""
        super().__init__(cfg, dictionary, embed_tokens, no_encoder_attn, **kwargs)  # builds the layers
        name_dropout(self, "TransformerDecoder")  # --retain-dropout-modules looks for this name.
        self.set_limit(stack_limit(cfg, cfg.decoder_head_groups))  # the longest sentence that all functions take
        self.share_block_table()  # A step of decoding then makes one table for all layers.

    def share_block_table(self) -> None:
        """Makes all layers read the block table of the first layer, so that a step of decoding makes a single table.

        The table tells in which rows of a layer's memory the keys and values of each hypothesis are.
        """
        first_attention = self.layers[0].self_attn
        # The loop is over indices: a loop over `self.layers` leaves layers out at random with --decoder-layerdrop.
        for index in range(1, len(self.layers)):
            self.layers[index].self_attn.share_table(first_attention)

    def build_decoder_layer(self, cfg: TransformerConfig, no_encoder_attn: bool = False) -> nn.Module:
        groups = cfg.decoder_head_groups[self.count_layer()]
        return wrap_layer(SynthesizerDecoderLayer(cfg, groups, no_encoder_attn), cfg)

    def buffered_future_mask(self, tensor: Tensor) -> Tensor:
        """Returns the mask that fairseq gives to the layers: the `causal_mask`, because all sentences are aligned."""
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
        """Computes the features of the target tokens; arguments and result are those of fairseq's decoder.

        While the layers compute, all padding is after the tokens of its sentence. In the result, each token is in the
        column that it has in `prev_output_tokens`.

        Args:
            prev_output_tokens: (B, T), padded on either side; in incremental decoding all tokens so far.
            encoder_out: The output of the encoder, or None in a language model.
            incremental_state: The state of incremental decoding, or None for whole sentences.
            full_context_alignment: Whether the attention may look at later tokens.
            alignment_layer: The layer whose attention to the encoder is returned; None for the last one.
            alignment_heads: The number of heads over which it is averaged; None for all.

        Raises:
            ValueError: T is above ``--synth-max-length``.
        """
        self.check_length(prev_output_tokens)
        # The column to which each token moves; None if nothing moves. In incremental decoding, nothing moves, because
        # the position of a new token comes from the cache.
        columns = None
        if incremental_state is None:
            columns = aligned_columns(prev_output_tokens.eq(self.padding_idx))
        features, extra = self.extract_features_scriptable(
            align(prev_output_tokens, columns),
            encoder_out,
            incremental_state,
            full_context_alignment,
            alignment_layer,
            alignment_heads,
        )
        extra["attn"] = restore_all(extra["attn"], columns, batch_first=True)  # (B, T, S)
        extra["inner_states"] = restore_all(extra["inner_states"], columns)  # (T, B, C) for each layer
        return restore(features, columns, batch_first=True), extra
