"""Encoders: RoBERTa with synthesized self-attention, for masked language models and the prediction of labels."""

import argparse
from dataclasses import field
from typing import Any, Optional

import torch.nn as nn
from fairseq.dataclass import ChoiceEnum
from fairseq.models.roberta.model import RobertaEncoder, RobertaModel, base_architecture
from fairseq.models.transformer import TransformerConfig, TransformerEncoderBase
from fairseq.tasks.masked_lm import MaskedLMTask
from fairseq.tasks.sentence_prediction import SentencePredictionTask
from fairseq.utils import get_available_activation_fns
from torch import Tensor

from .config import SYNTHESIZER_FLAGS, check_flags, config_class, flag, flatten, limit_of, stack_flag
from .errors import SynthesizerError
from .layers import SynthesizerEncoder
from .lengths import Limit, announce_limit, check_rows, flag_of
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


# of fairseq's roberta, on the command line
ROBERTA_FLAGS = [
    flag(
        "max_positions",
        Optional[int],  # noqa: UP045 - fairseq reads the type, and does not know `int | None`
        None,
        "number of positions to embed, and the longest input in tokens",
    ),
    flag(
        "pooler_activation_fn",
        ChoiceEnum(get_available_activation_fns()),
        "tanh",
        "activation function of the classification heads",
    ),
    flag("pooler_dropout", float, 0.0, "dropout probability in the classification heads"),
    flag(
        "untie_weights_roberta",
        bool,
        False,
        "do not share the embedding with the output layer of the masked language model",
    ),
    flag("spectral_norm_classification_head", bool, False, "spectral normalization of the classification heads"),
    flag("load_checkpoint_heads", bool, False, "also load the classification heads of a checkpoint"),
    *(
        (name, kind, field(default=getattr(DEFAULTS, name, default.default), metadata=default.metadata))
        for name, kind, default in flatten(TransformerConfig)
        if is_flag(name)
    ),
]
# what makes an encoder a RoBERTa: not on the command line, but of architectures and under Hydra
STRUCTURE = ("encoder_learned_pos", "layernorm_embedding", "no_scale_embedding")
STRUCTURE_FLAGS = [flag(name, bool, True, "") for name in STRUCTURE]


class SynthesizerRobertaEncoder(RobertaEncoder):
    """fairseq's RobertaEncoder around another stack of layers."""

    stack: type[TransformerEncoderBase] = SynthesizerEncoder

    def build_encoder(
        self, args: argparse.Namespace, dictionary: Any, embed_tokens: nn.Embedding
    ) -> TransformerEncoderBase:
        return self.stack(TransformerConfig.from_namespace(args), dictionary, embed_tokens)


class SynthesizerRoberta(SynthesizerModel, RobertaModel):
    """fairseq's ``roberta`` with synthesized self-attention."""

    kind = "encoder"
    stacks: tuple[str, ...] = ("encoder",)
    tasks = (MaskedLMTask, SentencePredictionTask)
    task_names = "masked_lm or sentence_prediction"
    config = config_class(
        "SynthesizerRobertaConfig", *SYNTHESIZER_FLAGS, stack_flag("encoder"), *ROBERTA_FLAGS, *STRUCTURE_FLAGS
    )
    hidden = STRUCTURE
    encoder_class = SynthesizerRobertaEncoder

    @classmethod
    def hub_models(cls) -> dict[str, Any]:
        """None: fairseq's are RoBERTa's own."""
        return {}

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "SynthesizerRoberta":
        """Builds the model of a config, see `SynthesizerModel`."""
        args = cls.read_config(cfg, task)
        limit = cls.check_encoder(args)
        tokens_per_sample = flag_of(task, "tokens_per_sample") or 0
        args.max_positions = args.max_positions or task.max_positions() or tokens_per_sample
        check_rows("--tokens-per-sample", tokens_per_sample, limit)
        check_rows("--max-positions", args.max_positions, limit)
        model = cls(args, cls.encoder_class(args, task.source_dictionary))
        announce_limit(task, limit)
        return model

    def load_state_dict(self, state_dict: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """As in `SynthesizerModel`, and with ``--load-checkpoint-heads`` for weights of another ``--num-classes``."""
        if getattr(self.args, "load_checkpoint_heads", False):
            self.check_classes(state_dict)
        return super().load_state_dict(state_dict, *args, **kwargs)

    def check_classes(self, state_dict: dict[str, Tensor]) -> None:
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
    def check_encoder(cls, args: argparse.Namespace) -> Limit | None:
        """Checks the flags of the self-attention; returns its limit, if it has one."""
        check_flags(args, "encoder")
        return limit_of(args, args.encoder_synthesizer)
