"""Encoders: RoBERTa with synthesized self-attention, for masked language models and the prediction of labels."""

import argparse
import dataclasses
from dataclasses import field
from typing import Any, Dict, Optional

import torch.nn as nn
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models.roberta.model import RobertaEncoder, RobertaModel, base_architecture
from fairseq.models.transformer import TransformerConfig, TransformerEncoderBase
from fairseq.utils import get_available_activation_fns
from torch import Tensor

from .config import EncoderSynthesizerConfig, SynthesizerConfig, check_flags, check_rows, flatten, length_limit
from .errors import SynthesizerError
from .layers import SynthesizerEncoder
from .lengths import flag_of
from .model import SynthesizerModel

# of fairseq's Transformer, beside --encoder-* and --quant-noise-*
TRANSFORMER_FLAGS = (
    "activation_fn",
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "no_token_positional_embeddings",
    "checkpoint_activations",
    "offload_activations",
    "min_params_to_wrap",
)
DEFAULTS = argparse.Namespace()
base_architecture(DEFAULTS)


def is_flag(name: str) -> bool:
    """Whether a flag of fairseq's Transformer is one of an encoder's."""
    if name in ("encoder_learned_pos", "encoder_embed_path"):
        return False
    return name in TRANSFORMER_FLAGS or name.startswith(("encoder_", "quant_noise_"))


@dataclasses.dataclass
class RobertaConfig(FairseqDataclass):
    """The flags of fairseq's ``roberta`` that its Transformer has not."""

    max_positions: Optional[int] = field(
        default=None, metadata={"help": "number of positions to embed, and the longest input in tokens"}
    )
    pooler_activation_fn: ChoiceEnum(get_available_activation_fns()) = field(  # type: ignore[valid-type]
        default="tanh", metadata={"help": "activation function of the classification heads"}
    )
    pooler_dropout: float = field(default=0.0, metadata={"help": "dropout probability in the classification heads"})
    untie_weights_roberta: bool = field(
        default=False,
        metadata={"help": "do not share the embedding with the output layer of the masked language model"},
    )
    spectral_norm_classification_head: bool = field(
        default=False, metadata={"help": "spectral normalization of the classification heads"}
    )
    load_checkpoint_heads: bool = field(
        default=False, metadata={"help": "also load the classification heads of a checkpoint"}
    )


RobertaFlags: Any = dataclasses.make_dataclass(
    "RobertaFlags",
    [
        (name, kind, field(default=getattr(DEFAULTS, name, default.default), metadata=default.metadata))
        for name, kind, default in flatten(TransformerConfig)
        if is_flag(name)
    ],
    bases=(RobertaConfig,),
    namespace={"__module__": __name__, "__doc__": "The flags of an encoder on the command line."},
)


@dataclasses.dataclass
class SynthesizerRobertaFlags(EncoderSynthesizerConfig, SynthesizerConfig, RobertaFlags):  # type: ignore[misc]
    """The flags on the command line: an encoder's and the synthesizers'."""


@dataclasses.dataclass
class RobertaStructure(FairseqDataclass):
    """What makes an encoder a RoBERTa: not on the command line, but of architectures and under Hydra."""

    encoder_learned_pos: bool = True
    layernorm_embedding: bool = True
    no_scale_embedding: bool = True


@dataclasses.dataclass
class SynthesizerRobertaConfig(RobertaStructure, SynthesizerRobertaFlags):
    """Every flag of fairseq's ``roberta`` and of the synthesizers, flat."""


class SynthesizerRobertaEncoder(RobertaEncoder):
    """fairseq's RobertaEncoder around another stack of layers."""

    stack: Any = SynthesizerEncoder

    def build_encoder(
        self, args: argparse.Namespace, dictionary: Any, embed_tokens: nn.Embedding
    ) -> TransformerEncoderBase:
        return self.stack(TransformerConfig.from_namespace(args), dictionary, embed_tokens)


class SynthesizerRoberta(SynthesizerModel, RobertaModel):
    """fairseq's ``roberta`` with synthesized self-attention."""

    kind = "encoder"
    config: Any = SynthesizerRobertaConfig
    flags: Any = SynthesizerRobertaFlags
    encoder_class = SynthesizerRobertaEncoder

    @classmethod
    def hub_models(cls) -> Dict[str, Any]:
        """None: fairseq's are RoBERTa's own."""
        return {}

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "SynthesizerRoberta":
        """Builds the model.

        Args:
            cfg: the flat config, as Hydra's DictConfig, a dataclass or a Namespace.
            task: fairseq's task, for its dictionary and, without ``--max-positions``, its longest row.

        Raises:
            SynthesizerError: a flag is invalid or cannot apply; the message names it.
        """
        args = cls.read_config(cfg, task)
        length = cls.check_encoder(args)
        args.max_positions = args.max_positions or task.max_positions()
        check_rows("--tokens-per-sample", flag_of(task, "tokens_per_sample") or 0, length)
        check_rows("--max-positions", args.max_positions, length)
        model = cls(args, cls.encoder_class(args, task.source_dictionary))
        cls.limit_lengths(task, length)
        return model

    def load_state_dict(self, state_dict: Dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """As fairseq's own.

        Raises:
            SynthesizerError: the weights are of another kind of model, of another ``--max-positions``, or with
                ``--load-checkpoint-heads`` of another ``--num-classes``.
        """
        own = getattr(self.encoder.sentence_encoder.embed_positions, "weight", None)
        # fairseq's published models call the encoder "decoder"
        names = [f"{side}.sentence_encoder.embed_positions.weight" for side in ("encoder", "decoder")]
        theirs = next((state_dict[name] for name in names if name in state_dict), None)
        if own is not None and theirs is not None and own.shape[0] != theirs.shape[0]:
            trained = self.args.max_positions + theirs.shape[0] - own.shape[0]
            raise SynthesizerError(
                f"--max-positions {self.args.max_positions}: the checkpoint was trained with {trained}; give that, or "
                "another checkpoint"
            )
        if getattr(self.args, "load_checkpoint_heads", False):
            self.check_classes(state_dict)
        return super().load_state_dict(state_dict, *args, **kwargs)

    def check_classes(self, state_dict: Dict[str, Tensor]) -> None:
        """Raises SynthesizerError if a classification head in the state dict has another number of classes."""
        for name, head in self.classification_heads.items():
            weight = state_dict.get(f"classification_heads.{name}.out_proj.weight")
            classes = head.out_proj.out_features
            if weight is not None and len(weight) != classes:
                raise SynthesizerError(
                    f"--num-classes {classes}: the head {name!r} of the checkpoint has {len(weight)} classes; give "
                    "that, another --classification-head-name, or leave --load-checkpoint-heads out"
                )

    @classmethod
    def check_encoder(cls, args: argparse.Namespace) -> Optional[int]:
        """Checks the flags of the self-attention; returns the longest input that it takes, if it has a limit."""
        check_flags(args, "encoder")
        return length_limit(args, args.encoder_synthesizer)
