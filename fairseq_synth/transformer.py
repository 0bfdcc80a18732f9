"""fairseq's Transformer with `SyntheticAttention` as its self-attention: flags, model, encoder, decoder, layers."""

import argparse
import dataclasses
import logging
import math
from dataclasses import field
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch.nn as nn
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.distributed import fsdp_wrap
from fairseq.models import register_model
from fairseq.models.transformer import (
    TransformerConfig,
    TransformerDecoderBase,
    TransformerEncoderBase,
    TransformerModelBase,
)
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from omegaconf import II, OmegaConf
from torch import Tensor

from .attention import SyntheticAttention
from .errors import SynthesizerError, built_lengths
from .host.layers import FAST_PATH_COPIES, TransformerEncoderLayerBase
from .lengths import check_min_len, check_padding, cut_sources
from .masks import align, aligned_columns, causal_mask, restore
from .synthesizers import MIXTURES, SYNTHESIZERS, Mixture, parse_spec

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class SynthesizerConfig(FairseqDataclass):
    """The plugin's own flags; `SynthesizerTransformerConfig` adds those of fairseq's Transformer."""

    encoder_synthesizer: str = field(
        default="random+vanilla",
        metadata={
            "help": "what computes the attention logits in the encoder's self-attention: one of "
            f"{', '.join(SYNTHESIZERS)}, or several joined by '+' (random+vanilla); one for all layers, or "
            "one for each layer separated by commas (random,random,vanilla for three layers)"
        },
    )
    decoder_synthesizer: str = field(
        default="random+vanilla",
        metadata={"help": "the same for the decoder's self-attention; attention to the encoder is never replaced"},
    )
    synth_max_length: int = field(
        default=256,
        metadata={
            "help": "longest sentence in tokens that the model can read or write, end of sentence included: the "
            "size of the synthesized matrices (l in the paper). Fixed once trained. No limit for vanilla"
        },
    )
    synth_rank: int = field(
        default=8, metadata={"help": "rank of the two matrices of factorized_random (k in the paper)"}
    )
    synth_mixture: ChoiceEnum(MIXTURES) = field(  # type: ignore[valid-type]
        default="convex",
        metadata={
            "help": "how functions joined by '+' mix: 'convex' weighs them by learned weights that sum to 1 (the "
            "paper's), 'sum' adds their logits, so that a model can start from a trained stock Transformer"
        },
    )


def flatten(cls: type, prefix: str = "") -> List[Tuple[str, Any, Any]]:
    """The fields of fairseq's nested config under their command-line names: encoder.embed_dim -> encoder_embed_dim.

    A flat config is the one that both the command line and Hydra fill without losing a key, and that leaves
    only plain values in a checkpoint.
    """
    flat: List[Tuple[str, Any, Any]] = []
    for f in dataclasses.fields(cls):
        nested = f.default_factory if f.default is dataclasses.MISSING else f.default
        if f.name == "_name":
            continue
        if f.name in ("encoder", "decoder", "quant_noise"):
            flat += flatten(nested if isinstance(nested, type) else type(nested), f"{f.name}_")
            continue
        default, annotation = f.default, f.type
        if prefix == "decoder_" and f.name in ("input_dim", "output_dim"):
            default = II("model.decoder_embed_dim")
        if f.name == "layers_to_keep":
            annotation = Optional[str]  # the host declares a list and splits a string
        flat.append((prefix + f.name, annotation, field(default=default, metadata=f.metadata)))
    return flat


SynthesizerTransformerConfig: Any = dataclasses.make_dataclass(
    "SynthesizerTransformerConfig",
    flatten(TransformerConfig),
    bases=(SynthesizerConfig,),
    namespace={"__module__": __name__, "__doc__": "Every flag of the Transformer and of the synthesizers, flat."},
)


@register_model("transformer_synth", dataclass=SynthesizerTransformerConfig)
class SynthesizerTransformer(TransformerModelBase):
    """The Transformer with synthesized self-attention (arXiv 2005.00743); cross-attention stays as it is."""

    reads_targets = True

    @classmethod
    def add_args(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the flags, without defaults: those are the architecture's."""
        gen_parser_from_dataclass(parser, SynthesizerTransformerConfig(), delete_default=True)

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "SynthesizerTransformer":
        """Builds the model.

        Args:
            cfg: the flat config, as Hydra's DictConfig, a dataclass or a Namespace.
            task: fairseq's task, for its dictionaries.

        Raises:
            SynthesizerError: a flag is invalid or cannot apply; the message names it.
        """
        model = super().build_model(transformer_config(cfg), task)
        if model.encoder.max_length or model.decoder.max_length:
            length = model.cfg.synth_max_length
            check_padding(task, length)
            cut_sources(task, model.encoder.max_positions())
            built_lengths.add(length)
            logger.info(f"--synth-max-length {length}: longer sentences are skipped in training, refused elsewhere")
        return model

    @classmethod
    def build_encoder(cls, cfg: TransformerConfig, src_dict: Any, embed_tokens: nn.Embedding) -> "SynthesizerEncoder":
        return SynthesizerEncoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, cfg: TransformerConfig, tgt_dict: Any, embed_tokens: nn.Embedding) -> "SynthesizerDecoder":
        return SynthesizerDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)

    def prepare_for_inference_(self, cfg: Any) -> None:
        """As the host's. From here on references are compared with the output, and are not read by the model.

        Raises:
            SynthesizerError: ``--min-len`` is more than the model can write.
        """
        super().prepare_for_inference_(cfg)
        generation = getattr(cfg, "generation", None)
        self.reads_targets = bool(getattr(generation, "score_reference", False))
        if not self.reads_targets:
            check_min_len(generation, self.decoder.max_positions(), self.decoder.max_length)

    def max_positions(self) -> Tuple[int, float]:
        """Longest source and target in tokens; a reference that the model does not read may have any length."""
        source, target = super().max_positions()
        return source, target if self.reads_targets else math.inf


def transformer_config(cfg: Any) -> TransformerConfig:
    """The flat config as fairseq's nested one, checked, with the synthesizers of each layer to be built.

    Raises:
        SynthesizerError: a flag is invalid or cannot apply.
    """
    if OmegaConf.is_config(cfg):
        flat: Any = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
        args = argparse.Namespace(**flat)
    else:
        args = argparse.Namespace(**vars(SynthesizerTransformerConfig.from_namespace(cfg)))
        for name in ("decoder_input_dim", "decoder_output_dim"):
            if str(getattr(args, name)).startswith("${"):
                setattr(args, name, args.decoder_embed_dim)
        args.synth_mixture, args.activation_fn = str(args.synth_mixture), str(args.activation_fn)
    if args.cross_self_attention:
        raise SynthesizerError(
            "--cross-self-attention joins the encoder's keys to the decoder's; synthesized logits have no such keys: "
            "leave the flag out"
        )
    for flag, least in (("synth_max_length", 2), ("synth_rank", 1)):  # 2: a token and the end of the sentence
        if getattr(args, flag) < least:
            raise SynthesizerError(f"--{flag.replace('_', '-')} {getattr(args, flag)}: must be at least {least}")
    for side in ("encoder", "decoder"):
        width, heads = getattr(args, f"{side}_embed_dim"), getattr(args, f"{side}_attention_heads")
        if heads < 1 or width % heads:
            raise SynthesizerError(
                f"--{side}-attention-heads {heads} does not divide --{side}-embed-dim {width}; choose a divisor"
            )
        setattr(args, f"{side}_synthesizer", layer_specs(args, side))
    return TransformerConfig.from_namespace(args)


def layer_specs(args: argparse.Namespace, side: str) -> List[Tuple[str, ...]]:
    """The functions of each layer that is to be built, from ``--{side}-synthesizer``.

    Raises:
        SynthesizerError: an unknown function, or another number of layers than the model has.
    """
    flag = f"--{side}-synthesizer"
    spec, layers = getattr(args, f"{side}_synthesizer"), getattr(args, f"{side}_layers")
    kept = getattr(args, f"{side}_layers_to_keep", None)
    specs = [parse_spec(part, flag) for part in spec.split(",")]
    if len(specs) == 1:
        specs = specs * layers
    if len(specs) != layers:
        raise SynthesizerError(f"{flag} {spec!r} names {len(specs)} layers, --{side}-layers is {layers}")
    if not kept:
        return specs
    try:
        return [specs[i] for i in sorted(int(n) for n in kept.split(","))]
    except (ValueError, IndexError):
        raise SynthesizerError(
            f"--{side}-layers-to-keep {kept!r}: give numbers of layers, 0 to {layers - 1}, joined by commas"
        ) from None


def build_attention(
    cfg: TransformerConfig, side: str, names: Sequence[str], quant_noise: float, block_size: int
) -> SyntheticAttention:
    """The self-attention of one layer; `side` is ``encoder`` or ``decoder``, `names` its functions."""
    embed_dim, heads = getattr(cfg, side).embed_dim, getattr(cfg, side).attention_heads
    mixture = Mixture(names, cfg.synth_mixture, heads, embed_dim // heads, cfg.synth_max_length, cfg.synth_rank)
    return SyntheticAttention(embed_dim, heads, mixture, cfg.attention_dropout, quant_noise, block_size)


def wrap_layer(layer: nn.Module, cfg: TransformerConfig) -> nn.Module:
    """Activation checkpointing and sharding, as fairseq wraps its own layers."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)


class SynthesizerEncoderLayer(TransformerEncoderLayerBase):
    """fairseq's encoder layer around a `SyntheticAttention` of the functions `names`."""

    def __init__(self, cfg: TransformerConfig, names: Sequence[str], return_fc: bool = False) -> None:
        self.names = tuple(names)
        super().__init__(cfg, return_fc=return_fc)

    def build_self_attention(self, embed_dim: int, cfg: TransformerConfig) -> SyntheticAttention:
        return build_attention(cfg, "encoder", self.names, self.quant_noise, self.quant_noise_block_size)

    def _load_from_state_dict(self, state_dict: Dict[str, Tensor], prefix: str, *args: Any) -> None:
        for name in FAST_PATH_COPIES:
            state_dict.pop(prefix + name, None)
        nn.Module._load_from_state_dict(self, state_dict, prefix, *args)


class SynthesizerDecoderLayer(TransformerDecoderLayerBase):
    """fairseq's decoder layer around a `SyntheticAttention` of the functions `names`."""

    def __init__(self, cfg: TransformerConfig, names: Sequence[str], no_encoder_attn: bool = False) -> None:
        self.names = tuple(names)
        super().__init__(cfg, no_encoder_attn)

    def build_self_attention(
        self, embed_dim: int, cfg: TransformerConfig, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> SyntheticAttention:
        return build_attention(cfg, "decoder", self.names, self.quant_noise, self.quant_noise_block_size)


class SynthesizerStack:
    """What encoder and decoder share: the functions of their layers, and the longest sentence.

    Args:
        cfg: fairseq's.
        specs: the functions of each layer, as `parse_spec` returns them.
        args, kwargs: the host's.
    """

    max_length: Optional[int]  # --synth-max-length, if any function has such a limit

    def __init__(self, cfg: TransformerConfig, specs: Sequence[Tuple[str, ...]], *args: Any, **kwargs: Any) -> None:
        limited = any(SYNTHESIZERS[name].has_max_length for names in specs for name in names)
        self.max_length = cfg.synth_max_length if limited else None
        self.first_spec = specs[0] if specs else ()
        super().__init__(cfg, *args, **kwargs)  # type: ignore[call-arg]  # of the host's class, the second base
        # the host builds all layers alike
        for i, names in enumerate(specs):
            if names != specs[0]:
                self.layers[i] = self.build_layer(cfg, names)  # type: ignore[attr-defined]

    def max_positions(self) -> int:
        """Longest sentence in tokens: the host's limit, or ``--synth-max-length`` where that is lower."""
        limits = [super().max_positions(), self.max_length]  # type: ignore[misc]
        return min(limit for limit in limits if limit is not None)

    def check_length(self, tokens: Tensor) -> None:
        """Raises ValueError if a batch (B, T) has more columns than the synthesized matrices."""
        limit = self.max_length
        if limit is not None and tokens.size(1) > limit:
            raise ValueError(
                "a sentence of {} tokens is longer than --synth-max-length {}; shorten it, or train with a larger "
                "--synth-max-length (with --required-seq-len-multiple: a multiple of that)".format(
                    tokens.size(1), limit
                )
            )


class SynthesizerEncoder(SynthesizerStack, TransformerEncoderBase):
    """fairseq's encoder. A sentence's first token is row 0 of every synthesized matrix, however it is padded."""

    def __init__(self, cfg: TransformerConfig, dictionary: Any, embed_tokens: nn.Embedding, **kwargs: Any) -> None:
        super().__init__(cfg, cfg.encoder_synthesizer, dictionary, embed_tokens, **kwargs)

    def build_encoder_layer(self, cfg: TransformerConfig) -> nn.Module:
        return self.build_layer(cfg, self.first_spec)

    def build_layer(self, cfg: TransformerConfig, names: Sequence[str]) -> nn.Module:
        return wrap_layer(SynthesizerEncoderLayer(cfg, names, return_fc=self.return_fc), cfg)

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Optional[Tensor] = None,
        return_all_hiddens: bool = False,
        token_embeddings: Optional[Tensor] = None,
    ) -> Dict[str, List[Tensor]]:
        """As the host's; left-padded sentences are aligned for the layers and handed back as they came.

        Args:
            src_tokens: (B, T), padded on either side.

        Raises:
            ValueError: T is beyond ``--synth-max-length``.
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
        out["encoder_padding_mask"] = [padding_mask]
        return out


class SynthesizerDecoder(SynthesizerStack, TransformerDecoderBase):
    """fairseq's decoder, with targets aligned as in `SynthesizerEncoder`."""

    def __init__(
        self,
        cfg: TransformerConfig,
        dictionary: Any,
        embed_tokens: nn.Embedding,
        no_encoder_attn: bool = False,
        **kwargs: Any,
    ) -> None:
        self.no_encoder_attn = no_encoder_attn
        super().__init__(cfg, cfg.decoder_synthesizer, dictionary, embed_tokens, no_encoder_attn, **kwargs)

    def build_decoder_layer(self, cfg: TransformerConfig, no_encoder_attn: bool = False) -> nn.Module:
        return self.build_layer(cfg, self.first_spec)

    def build_layer(self, cfg: TransformerConfig, names: Sequence[str]) -> nn.Module:
        return wrap_layer(SynthesizerDecoderLayer(cfg, names, self.no_encoder_attn), cfg)

    def buffered_future_mask(self, tensor: Tensor) -> Tensor:
        """What the host hands to the layers as the causal mask: `causal_mask`, as sentences are aligned."""
        return causal_mask(tensor)

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Optional[Dict[str, List[Tensor]]],
        incremental_state: Optional[Dict[str, Dict[str, Optional[Tensor]]]] = None,
        full_context_alignment: bool = False,
        alignment_layer: Optional[int] = None,
        alignment_heads: Optional[int] = None,
    ) -> Tuple[Tensor, Dict[str, List[Optional[Tensor]]]]:
        """As the host's; left-padded targets are aligned for the layers and handed back as they came.

        Args:
            prev_output_tokens: (B, T), padded on either side; in incremental decoding everything so far.

        Raises:
            ValueError: T is beyond ``--synth-max-length``.
        """
        self.check_length(prev_output_tokens)
        columns: Optional[Tensor] = None
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
        attn: List[Optional[Tensor]] = []  # B x T x S
        for weights in extra["attn"]:
            attn.append(None if weights is None else restore(weights, columns, batch_first=True))
        states: List[Optional[Tensor]] = []  # T x B x C
        for state in extra["inner_states"]:
            states.append(None if state is None else restore(state, columns))
        return restore(x, columns, batch_first=True), {"attn": attn, "inner_states": states}
