"""Translation: fairseq's Transformer with synthesized self-attention in encoder and decoder."""

import math
from typing import Any

import torch.nn as nn
from fairseq.models.transformer import TransformerConfig, TransformerModelBase
from fairseq.tasks.denoising import DenoisingTask
from fairseq.tasks.translation import TranslationTask

from .config import SYNTHESIZER_FLAGS, check_and_parse_flags, config_class, flatten, stack_flag, stack_limit
from .errors import SynthesizerError
from .layers import SynthesizerDecoder, SynthesizerEncoder
from .lengths import announce_limit, check_min_len, cut_sources
from .model import SynthesizerModel


class SynthesizerTransformer(SynthesizerModel, TransformerModelBase):
    """The Transformer with synthesized self-attention (arXiv 2005.00743); cross-attention is fairseq's.

    Attributes:
        reads_targets: whether the model reads references: in training, and with ``--score-reference``. If it does not,
            references may have any length.
        matches_sources: whether ``--match-source-len`` makes translations as long as their sources. If it does, sources
            may not be longer than a translation can be.
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
        args = cls.read_config(cfg, task)
        if args.cross_self_attention:
            raise SynthesizerError(
                "--cross-self-attention joins the encoder's keys to the decoder's; synthesized logits have no such "
                "keys: leave the flag out"
            )
        if args.tie_adaptive_weights:
            raise SynthesizerError(
                "--tie-adaptive-weights shares weights with --adaptive-input, which only language models have: leave "
                "it out"
            )
        # This replaces the text of both flags by a list with the heads of each layer.
        check_and_parse_flags(args, *cls.stacks)
        heads_of_layers = [*args.encoder_synthesizer, *args.decoder_synthesizer]
        length_limit = stack_limit(args, heads_of_layers)  # how long a sentence may be; None if there is no limit
        model = super().build_model(TransformerConfig.from_namespace(args), task)
        announce_limit(task, length_limit)
        if length_limit:
            # The task shortens sources that are too long, if the user has asked for that (`--truncate-source`).
            cut_sources(task, model.encoder.max_positions())
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

        It also finds out how long sources and references may be from here on (`max_positions`). A model that generates
        does not read the references, unless ``--score-reference`` makes it score them; so they may have any length.

        Args:
            cfg: fairseq's whole config.

        Raises:
            SynthesizerError: ``--min-len`` is more than the model can write.
        """
        super().prepare_for_inference_(cfg)
        generation = getattr(cfg, "generation", None)
        self.reads_targets = bool(getattr(generation, "score_reference", False))
        self.matches_sources = bool(getattr(generation, "match_source_len", False))
        if not self.reads_targets:
            check_min_len(generation, self.decoder)

    def max_positions(self) -> tuple[int, float]:
        """Returns the longest source and the longest target that the model takes, in tokens.

        A reference that is not read may have any length. With ``--match-source-len``, the search may write translations
        that are one token longer than the longest source of their batch. If the decoder's functions limit its length,
        sources therefore have to be one token shorter than that.
        """
        source, target = super().max_positions()
        if self.matches_sources and self.decoder.max_length is not None:
            source = min(source, self.decoder.max_positions() - 1)
        if not self.reads_targets:
            target = math.inf
        return source, target
