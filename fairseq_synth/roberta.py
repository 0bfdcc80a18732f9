"""Builds encoders: RoBERTa with synthesized self-attention, for masked language models and the prediction of labels."""

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

from .config import (
    SYNTHESIZER_FLAGS,
    Flag,
    check_and_parse_flags,
    config_class,
    flatten,
    make_flag,
    stack_flag,
    stack_limit,
)
from .errors import SynthesizerError
from .layers import SynthesizerEncoder
from .lengths import Limit, check_and_announce_limit, check_rows, task_flag
from .model import SynthesizerModel

# the flags of fairseq's Transformer that an encoder has, in addition to --encoder-* and --quant-noise-*
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
# the defaults of fairseq's own RoBERTa
DEFAULTS = argparse.Namespace()
base_architecture(DEFAULTS)


def is_encoder_flag(name: str) -> bool:
    """Returns whether our encoder takes this flag of fairseq's Transformer; `name` is a setting such as ``dropout``."""
    # STRUCTURE has the first of these flags already, and RoBERTa cannot load embeddings from a file.
    if name in ("encoder_learned_pos", "encoder_embed_path"):
        return False
    return name in TRANSFORMER_FLAGS or name.startswith(("encoder_", "quant_noise_"))


def transformer_flags() -> list[Flag]:
    """Returns the flags of fairseq's Transformer that an encoder has, with the defaults of fairseq's RoBERTa."""
    flags: list[Flag] = []
    for original in flatten(TransformerConfig):
        if is_encoder_flag(original.name):
            default = getattr(DEFAULTS, original.name, original.field.default)
            roberta_field = field(default=default, metadata=original.field.metadata)
            flags.append(Flag(original.name, original.annotation, roberta_field))
    return flags


# the flags of fairseq's RoBERTa that are on the command line
ROBERTA_FLAGS = [
    make_flag(
        "max_positions",
        Optional[int],  # noqa: UP045 - fairseq reads the annotation, and does not know `int | None`
        None,
        "number of positions to embed, and the longest input in tokens",
    ),
    make_flag(
        "pooler_activation_fn",
        ChoiceEnum(get_available_activation_fns()),
        "tanh",
        "activation function of the classification heads",
    ),
    make_flag("pooler_dropout", float, 0.0, "dropout probability in the classification heads"),
    make_flag(
        "untie_weights_roberta",
        bool,
        False,
        "do not share the embedding with the output layer of the masked language model",
    ),
    make_flag("spectral_norm_classification_head", bool, False, "spectral normalization of the classification heads"),
    make_flag("load_checkpoint_heads", bool, False, "also load the classification heads of a checkpoint"),
    *transformer_flags(),
]
# What makes an encoder a RoBERTa. Architectures set these flags, and Hydra knows them; the command line does not.
STRUCTURE = ("encoder_learned_pos", "layernorm_embedding", "no_scale_embedding")
STRUCTURE_FLAGS = [make_flag(name, bool, True, "") for name in STRUCTURE]


class SynthesizerRobertaEncoder(RobertaEncoder):
    """fairseq's RobertaEncoder around an encoder with synthesized self-attention, or another `stack`."""

    stack: type[TransformerEncoderBase] = SynthesizerEncoder

    def build_encoder(
        self, args: argparse.Namespace, dictionary: Any, embed_tokens: nn.Embedding
    ) -> TransformerEncoderBase:
        """Returns the encoder around which this one is built; fairseq's ``RobertaEncoder`` calls this."""
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
        """Returns {}: there are no models to download under a name. Those that fairseq knows are RoBERTa's."""
        return {}

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "SynthesizerRoberta":
        """Returns a new model with the settings in a config; see `SynthesizerModel`."""
        args = cls.check_and_parse_encoder(cls.read_config(cfg, task))
        if not args.max_positions:
            args.max_positions = longest_row(task)

        # A row is the text that the model reads at once. The functions of the self-attention may limit its length.
        limit = cls.encoder_limit(args)
        check_rows("--tokens-per-sample", tokens_per_sample(task), limit)
        check_rows("--max-positions", args.max_positions, limit)

        encoder = cls.encoder_class(args, task.source_dictionary)
        model = cls(args, encoder)
        check_and_announce_limit(task, limit)
        return model

    def load_state_dict(self, state_dict: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """Loads the weights of a checkpoint; see `SynthesizerModel.load_state_dict`.

        With ``--load-checkpoint-heads``, this raises SynthesizerError also if the checkpoint has another number of
        classes than the model.
        """
        if getattr(self.args, "load_checkpoint_heads", False):
            self.check_classes(state_dict)
        return super().load_state_dict(state_dict, *args, **kwargs)

    def check_classes(self, state_dict: dict[str, Tensor]) -> None:
        """Checks that each classification head has as many classes in the checkpoint as in the model.

        Args:
            state_dict: the weights of the checkpoint.

        Raises:
            SynthesizerError: a head has another number of classes.
        """
        for name, head in self.classification_heads.items():
            weight = state_dict.get(f"classification_heads.{name}.out_proj.weight")
            num_classes = head.out_proj.out_features
            if weight is not None and len(weight) != num_classes:
                raise SynthesizerError(
                    f"--num-classes {num_classes}: the head {name!r} of the checkpoint has {len(weight)} classes; use "
                    "that number, set another --classification-head-name, or remove --load-checkpoint-heads"
                )

    @classmethod
    def check_and_parse_encoder(cls, args: argparse.Namespace) -> argparse.Namespace:
        """Returns the flags after checking those of the self-attention; see `check_and_parse_flags`."""
        return check_and_parse_flags(args, cls.stacks)

    @classmethod
    def encoder_limit(cls, args: argparse.Namespace) -> Limit | None:
        """Returns the longest sentence that the self-attention takes, or None if sentences may have any length.

        Args:
            args: the flags, as `check_and_parse_encoder` returns them.
        """
        return stack_limit(args, args.encoder_head_groups)


def longest_row(task: Any) -> int:
    """Returns the number of tokens in the longest row of text that a task gives to a model."""
    max_positions: int | None = task.max_positions()  # None if the task has no limit of its own
    if max_positions:
        return max_positions
    return tokens_per_sample(task)


def tokens_per_sample(task: Any) -> int:
    """Returns the value of ``--tokens-per-sample``, or 0 if the task has no such flag."""
    value: int | None = task_flag(task, "tokens_per_sample")
    if value is None:
        return 0
    return value
