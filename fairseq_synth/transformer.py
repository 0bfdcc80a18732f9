"""Translation: fairseq's Transformer with synthesized self-attention in encoder and decoder."""

import argparse
import math
from typing import Any

import torch.nn as nn
from fairseq.models.transformer import TransformerConfig, TransformerModelBase
from fairseq.tasks.denoising import DenoisingTask
from fairseq.tasks.translation import TranslationTask

from .config import SYNTHESIZER_FLAGS, check_and_parse_flags, config_class, flatten, stack_flag, stack_limit
from .errors import SynthesizerError
from .layers import SynthesizerDecoder, SynthesizerEncoder
from .lengths import check_and_announce_limit, check_min_len, make_task_cut_sources
from .model import SynthesizerModel


class SynthesizerTransformer(SynthesizerModel, TransformerModelBase):
    """The Transformer with synthesized self-attention (arXiv 2005.00743); cross-attention is fairseq's.

    Attributes:
        reads_targets: whether the model reads reference translations: in training, and with ``--score-reference``.
        matches_sources: whether ``--match-source-len`` limits translations to the length of their sources.
    """

    kind = "translation model"
    stacks = ("encoder", "decoder")
    tasks = (TranslationTask, DenoisingTask)
    task_names = "translation or denoising"
    config = config_class(
        "SynthesizerTransformerConfig",
        *SYNTHESIZER_FLAGS,
        stack_flag("encoder"),
        stack_flag("decoder"),
        *flatten(TransformerConfig),
    )
    reads_targets = True
    matches_sources = False

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "SynthesizerTransformer":
        """Returns a new model with the settings in a config; see `SynthesizerModel`."""
        flags = cls.read_config(cfg, task)
        check_supported(flags)
        # This adds `encoder_head_groups` and `decoder_head_groups`: the functions of the heads in each layer.
        args = check_and_parse_flags(flags, cls.stacks)
        # fairseq's method passes this form of the flags, its own config, on to `build_encoder` and `build_decoder`.
        model = super().build_model(TransformerConfig.from_namespace(args), task)

        # If the functions limit the length of sentences, the task has to respect the limit.
        all_layers = [*args.encoder_head_groups, *args.decoder_head_groups]
        limit = stack_limit(args, all_layers)  # None if the functions take sentences of any length
        if limit is not None:
            check_and_announce_limit(task, limit)
            make_task_cut_sources(task, model.encoder.max_positions())
        return model

    @classmethod
    def build_encoder(cls, cfg: TransformerConfig, src_dict: Any, embed_tokens: nn.Embedding) -> SynthesizerEncoder:
        """Returns the encoder; fairseq's ``build_model`` calls this."""
        return SynthesizerEncoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, cfg: TransformerConfig, tgt_dict: Any, embed_tokens: nn.Embedding) -> SynthesizerDecoder:
        """Returns the decoder; fairseq's ``build_model`` calls this."""
        return SynthesizerDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)

    def prepare_for_inference_(self, cfg: Any) -> None:
        """Prepares the model for generation in place, as fairseq's own method does.

        It also sets `reads_targets` and `matches_sources`, on which the result of `max_positions` depends.

        Args:
            cfg: fairseq's whole config.

        Raises:
            SynthesizerError: ``--min-len`` is more than the model can write.
        """
        super().prepare_for_inference_(cfg)
        # The flags of the search. A user's own config may lack them; all of them then have fairseq's defaults.
        generation = getattr(cfg, "generation", None)
        self.reads_targets = bool(getattr(generation, "score_reference", False))
        self.matches_sources = bool(getattr(generation, "match_source_len", False))
        generates = not self.reads_targets  # With --score-reference, the model only reads references.
        if generates:
            check_min_len(generation, self.decoder)

    def max_positions(self) -> tuple[int, float]:
        """Returns the longest source and the longest target that the model takes, in tokens.

        They are those of fairseq's method, with two exceptions:

        * With ``--match-source-len``, a source of n tokens has a translation of up to n + 1 tokens. So if the decoder
          has ``--synth-max-length`` 100, for example, a source may have 99 tokens at most.
        * If the model does not read references, they may have any length.
        """
        longest_source, longest_target = super().max_positions()
        has_limited_decoder = self.decoder.max_length is not None
        if self.matches_sources and has_limited_decoder:
            longest_translation = self.decoder.max_positions()
            longest_source_of_it = longest_translation - 1  # in the example, 99
            longest_source = min(longest_source, longest_source_of_it)
        if not self.reads_targets:
            longest_target = math.inf
        return longest_source, longest_target


def check_supported(args: argparse.Namespace) -> None:
    """Raises SynthesizerError for flags of fairseq's Transformer that have no meaning in this model."""
    if args.cross_self_attention:
        raise SynthesizerError(
            "--cross-self-attention: not supported, because synthesized logits have no keys of the encoder; "
            "remove the flag"
        )
    if args.tie_adaptive_weights:
        raise SynthesizerError(
            "--tie-adaptive-weights: needs --adaptive-input, which only language models have; remove the flag"
        )
