"""Defines the flags of the Synthesizers and checks them, for every kind of model."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import Enum
from typing import Any, NamedTuple, Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from omegaconf import II, OmegaConf

from . import synthesizers
from .errors import SynthesizerError
from .heads import HeadGroup, parse_heads
from .lengths import Limit
from .synthesizers import BEYOND_LENGTH, MIXTURES


class Flag(NamedTuple):
    """A flag of the command line, which is also a field of the model's config.

    Attributes:
        name: the name of the field: ``synth_rank`` for ``--synth-rank``.
        annotation: its type, as fairseq's dataclasses write it.
        field: the dataclass field, with the default and the help.
    """

    name: str
    annotation: Any
    field: Any


def make_flag(name: str, annotation: Any, default: Any, help_text: str) -> Flag:
    """Returns a flag with a default and a help text."""
    return Flag(name, annotation, field(default=default, metadata={"help": help_text}))


# the flags that every kind of model with synthesizers has
SYNTHESIZER_FLAGS = [
    make_flag(
        "synth_max_length",
        int,
        256,
        "maximum length of a sentence in tokens, including the end-of-sentence token (l in the paper). It cannot be "
        "changed after training. vanilla accepts sentences of any length, and so does relative_random, which treats "
        "distances above this maximum alike",
    ),
    make_flag(
        "synth_beyond_length",
        ChoiceEnum(BEYOND_LENGTH),
        "refuse",
        "what to do with sentences longer than --synth-max-length: 'refuse' them, or 'tile' the synthesized matrices: "
        "position p uses row and column p mod l",
    ),
    make_flag("synth_rank", int, 8, "rank of the two matrices of factorized_random (k in the paper)"),
    make_flag(
        "synth_mixture",
        ChoiceEnum(MIXTURES),
        "convex",
        "how the logits of a mixture (functions joined by '+') are combined: 'convex' learns weights that sum to 1, as "
        "in the paper; 'sum' adds the logits, so that a model can start from a trained Transformer of fairseq",
    ),
]


def stack_flag(stack: str) -> Flag:
    """Returns the flag that chooses the functions of a stack, ``encoder`` or ``decoder``."""
    functions = ", ".join(synthesizers.SYNTHESIZERS)
    help_text = (
        f"function that computes the logits of the {stack}'s self-attention: one of {functions}, or a mixture joined "
        "by '+' (random+vanilla). Give one function for all layers, or one per layer, separated by commas "
        "(random,random,vanilla for three layers). To use several functions in the heads of a layer, separate them by "
        "'/' and give the numbers of heads (random:6/vanilla:2 for eight heads)"
    )
    if stack == "decoder":
        help_text += ". Cross-attention is never replaced"
    return make_flag(f"{stack}_synthesizer", str, "random+vanilla", help_text)


def config_class(name: str, *flags: Flag) -> Any:
    """Returns a dataclass with the flags of a model."""
    namespace = {"__module__": __name__, "__doc__": "Every flag of the model, flat."}
    return dataclasses.make_dataclass(name, flags, bases=(FairseqDataclass,), namespace=namespace)


# the fields of fairseq's configs that are dataclasses again
NESTED_FIELDS = ("encoder", "decoder", "quant_noise")
# {name of a flag: its default where fairseq's is wrong}. Both widths are that of the decoder, as on fairseq's command
# line. With Hydra, fairseq's default is always 512. II("model.x") is an interpolation: a reference to the value of x.
RIGHT_DEFAULTS = {
    "decoder_input_dim": II("model.decoder_embed_dim"),
    "decoder_output_dim": II("model.decoder_embed_dim"),
}
# {name of a flag: its type where fairseq's is wrong}. fairseq declares a list, but expects a text such as "0,2". (It
# does not know the annotation `str | None`.)
RIGHT_TYPES = {
    "encoder_layers_to_keep": Optional[str],  # noqa: UP045
    "decoder_layers_to_keep": Optional[str],  # noqa: UP045
}


def flatten(config: type) -> list[Flag]:
    """Returns the fields of fairseq's nested config as flags: ``encoder.embed_dim`` becomes ``encoder_embed_dim``.

    The config is flat because both the command line and Hydra can set every value of a flat config, while they would
    lose some values of a nested one. A flat config also leaves only plain values in a checkpoint.

    Args:
        config: a dataclass of fairseq. Its fields in `NESTED_FIELDS` are dataclasses that have only plain fields.
    """
    flags: list[Flag] = []
    for config_field in flag_fields(config):
        if config_field.name in NESTED_FIELDS:
            for nested_field in flag_fields(nested_class(config_field)):
                flags.append(field_to_flag(nested_field, name=f"{config_field.name}_{nested_field.name}"))
        else:
            flags.append(field_to_flag(config_field, name=config_field.name))
    return flags


def flag_fields(config: type) -> list[Any]:
    """Returns the fields of a dataclass of fairseq, without ``_name``, which is Hydra's name of the config."""
    return [config_field for config_field in dataclasses.fields(config) if config_field.name != "_name"]


def field_to_flag(config_field: Any, name: str) -> Flag:
    """Returns a plain field of fairseq's config as a flag.

    The flag has the default, type and help of the field, except where fairseq's default or type is wrong.

    Args:
        config_field: a field that is no dataclass. It has a default, and no default factory.
        name: the name of the flag.
    """
    default = RIGHT_DEFAULTS.get(name, config_field.default)
    annotation = RIGHT_TYPES.get(name, config_field.type)
    return Flag(name, annotation, field(default=default, metadata=config_field.metadata))


def nested_class(config_field: Any) -> type:
    """Returns the class of a part of fairseq's config, such as ``encoder``.

    The default of the field is an instance of the class in fairseq 0.12.2. In ve-fairseq it is the class itself, as a
    default or as a default factory.
    """
    has_factory = config_field.default is dataclasses.MISSING
    default = config_field.default_factory if has_factory else config_field.default
    return default if isinstance(default, type) else type(default)


def to_namespace(cfg: Any, config: type[FairseqDataclass]) -> argparse.Namespace:
    """Returns a model's config as a namespace that has a plain value for every flag of the model.

    Args:
        cfg: the flat config, as Hydra's DictConfig, a dataclass or a Namespace.
        config: the model's dataclass of flags. Its defaults are taken where `cfg` has no value, which is so if `cfg`
            comes from a checkpoint that is older than the flag.
    """
    settings = settings_of_hydra(cfg, config) if OmegaConf.is_config(cfg) else settings_of_object(cfg, config)
    plain_settings = {name: plain_value(settings, value) for name, value in settings.items()}
    return argparse.Namespace(**plain_settings)


def settings_of_hydra(cfg: Any, config: type[FairseqDataclass]) -> dict[str, Any]:
    """Returns {name: value} for every setting in a DictConfig, and the default for each flag that it lacks.

    A DictConfig may also have settings that are no flag of the model. They are kept.
    """
    settings: Any = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    flags = settings_of_object(argparse.Namespace(**settings), config)
    return {**flags, **settings}


def settings_of_object(cfg: Any, config: type[FairseqDataclass]) -> dict[str, Any]:
    """Returns {name of a flag: its value, or its default if `cfg` has no value}.

    Args:
        cfg: a Namespace, or an instance of `config`.
        config: the model's dataclass of flags.
    """
    return dict(vars(config.from_namespace(cfg)))


def plain_value(settings: Mapping[str, Any], value: Any) -> Any:
    """Returns a value of a model's config as a number, text, list, truth value or None.

    The member of an enum becomes its text. An interpolation is a reference to another setting, which nothing resolves
    outside of Hydra:

    * ``${model.decoder_embed_dim}`` becomes the value of ``decoder_embed_dim`` in `settings`.
    * ``${task.tokens_per_sample}`` becomes None, because it is in another part of fairseq's config.

    Args:
        settings: all settings of the model.
        value: the value of one of them.
    """
    if isinstance(value, Enum):
        return str(value)  # The enums of fairseq (`ChoiceEnum`) return their value here, such as "refuse".
    is_interpolation = isinstance(value, str) and value.startswith("${")
    if not is_interpolation:
        return value
    key = value.removeprefix("${").removesuffix("}")
    if not key.startswith("model."):
        return None
    referenced_value = settings[key.removeprefix("model.")]
    return plain_value(settings, referenced_value)  # It may be an interpolation, too.


def check_and_parse_flags(args: argparse.Namespace, stacks: Sequence[str]) -> argparse.Namespace:
    """Returns the flags of a model after checking them, with the heads that ``--encoder-synthesizer`` describes.

    The heads are in the additional attributes ``encoder_head_groups`` and ``decoder_head_groups``, in the form that
    `read_layers` returns. They are stored with the flags because fairseq passes nothing but the flags to the layers.

    Args:
        args: the flags of the model, which stay as they are.
        stacks: which of ``encoder`` and ``decoder`` the model has.

    Raises:
        SynthesizerError: a flag is invalid.
    """
    check_at_least(args, "synth_max_length", 2)  # a token and the end of the sentence
    check_at_least(args, "synth_rank", 1)
    if getattr(args, "base_layers", 0):
        raise SynthesizerError(f"--base-layers {args.base_layers}: base layers are not supported; remove the flag")
    head_groups = {}
    for stack in stacks:
        check_attention(args, stack)
        head_groups[f"{stack}_head_groups"] = read_layers(args, stack)
    return argparse.Namespace(**vars(args), **head_groups)


def check_at_least(args: argparse.Namespace, name: str, smallest: int) -> None:
    """Checks that the number given for a flag is not too small; raises SynthesizerError otherwise."""
    value = getattr(args, name)
    if value < smallest:
        raise SynthesizerError(f"--{name.replace('_', '-')} {value}: must be at least {smallest}")


def check_attention(args: argparse.Namespace, stack: str) -> None:
    """Checks the flags of a stack's self-attention that fairseq's own models have as well, such as the head count.

    Args:
        args: the flags of the model.
        stack: ``encoder`` or ``decoder``.

    Raises:
        SynthesizerError: the number of heads does not divide the width, or a flag is for fairseq's attention alone.
    """
    embed_dim = getattr(args, f"{stack}_embed_dim")
    num_heads = getattr(args, f"{stack}_attention_heads")
    if num_heads < 1 or embed_dim % num_heads != 0:
        raise SynthesizerError(
            f"--{stack}-attention-heads {num_heads} does not divide --{stack}-embed-dim {embed_dim}; choose a divisor"
        )
    if getattr(args, f"{stack}_xformers_att_config", None):
        raise SynthesizerError(
            f"--{stack}-xformers-att-config: is only for fairseq's attention, which this model replaces; remove it"
        )


def read_layers(args: argparse.Namespace, stack: str) -> list[tuple[HeadGroup, ...]]:
    """Returns the groups of heads of each layer, as ``--{stack}-synthesizer`` describes them.

    Layers that ``--{stack}-layers-to-keep`` leaves out are left out here, too.

    Args:
        args: the flags of the model.
        stack: ``encoder`` or ``decoder``.

    Raises:
        SynthesizerError: a function is unknown, or the flag names another number of layers or heads than there are.
    """
    flag = f"--{stack}-synthesizer"
    spec = getattr(args, f"{stack}_synthesizer")
    num_layers = getattr(args, f"{stack}_layers")
    num_heads = getattr(args, f"{stack}_attention_heads")
    groups_of_layers = [parse_heads(layer_spec, num_heads, flag) for layer_spec in spec.split(",")]
    if len(groups_of_layers) == 1:
        groups_of_layers = groups_of_layers * num_layers  # A value without commas is for all layers.
    if len(groups_of_layers) != num_layers:
        raise SynthesizerError(
            f"{flag} {spec!r} names {len(groups_of_layers)} layers, but --{stack}-layers is {num_layers}"
        )
    # Like --{stack}-layers, the list counts all layers. Only some of them may be built.
    return [groups_of_layers[layer] for layer in kept_layers(args, stack)]


def kept_layers(args: argparse.Namespace, stack: str) -> list[int]:
    """Returns the indices of the layers that are to be built: those in ``--{stack}-layers-to-keep``, or all.

    Args:
        args: the flags of the model.
        stack: ``encoder`` or ``decoder``.

    Raises:
        SynthesizerError: ``--{stack}-layers-to-keep`` names a layer that does not exist, or the same layer twice.
    """
    num_layers = getattr(args, f"{stack}_layers")
    layers_to_keep = getattr(args, f"{stack}_layers_to_keep", None)  # such as "0,2"
    if not layers_to_keep:
        return list(range(num_layers))
    # The numbers are compared as text: "0" and "2" exist, and "x" does not.
    numbers = [number.strip() for number in layers_to_keep.split(",")]
    existing_numbers = {str(layer) for layer in range(num_layers)}
    has_repetition = len(set(numbers)) < len(numbers)
    has_unknown_number = any(number not in existing_numbers for number in numbers)
    if has_repetition or has_unknown_number:
        raise SynthesizerError(
            f"--{stack}-layers-to-keep {layers_to_keep!r}: give layers from 0 to {num_layers - 1}, separated by "
            "commas, and name each layer once"
        )
    return sorted(int(number) for number in numbers)


def stack_limit(args: Any, layers: Sequence[Sequence[HeadGroup]]) -> Limit | None:
    """Returns the longest sentence that the functions of some layers take, or None if sentences may have any length.

    Args:
        args: the flags of the model.
        layers: the groups of heads of each layer, as `read_layers` returns them.
    """
    functions: set[str] = set()
    for layer_groups in layers:
        for group in layer_groups:
            functions.update(group.functions)
    tokens = synthesizers.longest_sentence(functions, args.synth_max_length, args.synth_beyond_length)
    if tokens is None:
        return None
    return Limit(tokens, "--synth-max-length")
